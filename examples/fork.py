"""Fork a branch: the prompt is evaluated once, and all continuations share its K/V cells."""

import llamabranch as lb


def main() -> None:
    with lb.load() as ctx:
        root = lb.Branch.start(ctx, "Once upon a time there was a", temperature=0.8, seed=1)
        before = ctx.usage().cells_used
        children = root.fork_many(3)
        print(f"3 forks of {root.position} tokens: {ctx.usage().cells_used - before} new cells\n")

        for child in children:
            story = child.generate_text(max_tokens=40)
            print(f"seq {child.seq_id}, perplexity {child.perplexity():.1f}: ...{story}\n")

        # Keep the branch with the lowest perplexity, and continue it.
        best = min(children, key=lambda child: child.perplexity())
        best.promote()
        more = best.generate_text(max_tokens=30)
        usage = ctx.usage()
        print(f"the best one continues: ...{more}\n")
        print(f"cells: {usage.cells_used} of {usage.cells_total}, sequences: {usage.sequences}")


if __name__ == "__main__":
    main()
