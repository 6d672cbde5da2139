"""The options and commands of llama.cpp that have another name here, or no counterpart; what to use.

A name that a command has itself is never looked up here. A hint names options of ``generate``, or gives
the whole command in backticks; a test compares both with the options that exist.
"""

from __future__ import annotations

__all__ = ["ACCEPTED", "COMMANDS_MEANT", "REFUSED"]

_SERVER = (
    "an option of `llamabranch serve`; `llamabranch generate --input` runs the requests of a file"
)
_NOT_SERVED = "`llamabranch serve` has nothing like it"
_MEDIA = "images and sounds are not supported"
_AFFINITY = "threads are placed by the system: --threads sets how many there are"
_LOG = "--verbose prints llama.cpp's log to standard error"
_NO_LOG = "llama.cpp's log is off unless --verbose is given"
_CONVERSATION = (
    "`llamabranch chat` is a conversation; elsewhere --chat wraps one prompt in the chat template"
)
_REASONING = "what a model thinks is part of the text here"
_DRAFT_NGRAM = "the copying drafters have no settings: --draft suffix, or --draft lookup"
_DEVICES = (
    "llama.cpp divides a model among all devices: --gpu-layers sets how much of it is on them"
)
_ADAPTERS = "adapters and control vectors are not supported"
_ROPE = "RoPE and YaRN settings are options of llamabranch.load in Python only"
_PRESET = "there are no presets: --model takes user/repo[:tag] of the Hugging Face hub"
_SWAPPED = "a full context ends the text: --n-ctx makes it larger"
_LOADING = "use --mlock, --no-mmap, or neither"
_KEPT = (
    "`llamabranch serve` keeps the K/V of finished texts, `llamabranch generate --prefix-cache` too"
)

# Options without a value that are so by themselves, by command.
ACCEPTED: dict[str, frozenset[str]] = {
    "chat": frozenset({"--jinja"}),
    "serve": frozenset(
        {"--jinja", "-cb", "--cont-batching", "--cache-prompt", "--no-ui", "--no-webui"}
    ),
}
# What some type in place of a command.
COMMANDS_MEANT = {
    "cli": "chat", "complete": "generate", "completion": "generate", "run": "chat", "server": "serve",
}  # fmt: skip

_BY_HINT: dict[str, str] = {
    "--list-devices": "`llamabranch doctor` tells whether models run on a GPU",
    "--version": "`llamabranch --version` prints it",
    "--usage": "use --help",
    "-cl --cache-list": "`llamabranch models` lists the models on this machine",
    "--completion-bash": "there is no completion of the command line",
    "--verbose-prompt": "--prompt-logprobs lists the tokens of a prompt",
    "-co --color --log-colors": "colours are used on a terminal: --no-color turns them off",
    "-tb --threads-batch -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
    "--spec-draft-threads-batch": "--threads is used for prompts and drafts too",
    "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
    "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --spec-draft-cpu-mask -Cd "
    "--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict "
    "--cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll --poll-draft "
    "--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-range-batch -Crbd "
    "--cpu-range-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft "
    "--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --numa": (
        _AFFINITY
    ),
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": (
        "--draft suffix copies from the text itself and keeps no file"
    ),
    "--kv-unified-per-slot": "--n-ctx is for all texts at a time, --parallel is their number",
    "--keep --context-shift --no-context-shift": _SWAPPED,
    "-gan --grp-attn-n -gaw --grp-attn-w": "self-extend is not supported; " + _SWAPPED,
    "--swa-full": "sliding-window layers keep the K/V of all positions already",
    "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step": (
        "there are no checkpoints to count: " + _KEPT
    ),
    "-kvu --kv-unified -no-kvu --no-kv-unified": "`llamabranch generate` and `llamabranch serve` have it",
    "-cram --cache-ram": "`llamabranch generate` and `llamabranch serve` have it, for the prefix cache",
    "--cache-idle-slots --no-cache-idle-slots --cache-prompt --no-cache-prompt --cache-reuse": _KEPT,
    "--prompt-cache --prompt-cache-all --prompt-cache-ro": (
        "a prompt's K/V is saved by Branch.save in Python; within a run " + _KEPT
    ),
    "--slot-save-path": "`llamabranch serve --snapshot-dir` keeps branches while the server is down",
    "--perf --no-perf --show-timings --no-show-timings": "speeds are in the table, or --json",
    "-bf --binary-file": "a prompt is text: --file",
    "-ptc --print-token-count": "the number of tokens is in the table, or --json",
    "-r --reverse-prompt": "--stop ends the text at a string",
    "-sp --special": "control tokens are never part of the text; their ids are in --json",
    "-cnv --conversation -no-cnv --no-conversation -st --single-turn -ins -if --interactive-first "
    "--interactive -mli --multiline-input": _CONVERSATION,
    "--in-prefix-bos --in-prefix --in-suffix --prefill-assistant --no-prefill-assistant": _CONVERSATION,
    "--warmup --no-warmup": "models are warmed up where something is timed, and only there",
    "--spm-infill": "infill is not supported: write the model's own markers into --prompt",
    "--samplers --sampler-seq --sampling-seq": "samplers run in llama.cpp's default order",
    "--adaptive-target --adaptive-decay --mirostat --mirostat-lr --mirostat-ent": (
        "samplers with a state of their own are not supported; --dynatemp-range and --min-p adapt to "
        "each distribution"
    ),
    "-bs --backend-sampling --spec-draft-backend-sampling --no-spec-draft-backend-sampling": (
        "tokens are sampled on the CPU"
    ),
    "--pooling --embd-normalize --embedding --embeddings --rerank --reranking --embd-gemma-default": (
        "there are no embeddings here, only texts"
    ),
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
    "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast": _ROPE,
    "-kvo --kv-offload -nkvo --no-kv-offload": "the KV cache is where the layers are: --gpu-layers",
    "--repack -nr --no-repack --no-host": "weights are repacked where llama.cpp can",
    "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd "
    "--cache-type-v-draft --spec-draft-type-v": "--kv-type sets the type of K and V, of target and draft",
    "-dt --defrag-thold": "a KV cache is compacted when its cells run out",
    "-ns --sequences": "`llamabranch generate --samples N` gives several texts for a prompt",
    "-np --parallel": "`llamabranch generate --parallel N` decodes several texts at a time",
    "-cb --cont-batching -nocb --no-cont-batching": (
        "batching is continuous: `llamabranch generate --parallel N` decodes several texts at a time"
    ),
    "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
    "--no-mmproj-offload -mmdev --mmproj-device --image --audio --video --image-min-tokens "
    "--image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval "
    "--video-ffmpeg-dir --media-path -hffv -mv -hfv": _MEDIA,
    "--rpc": "models run on this machine: `llamabranch generate --ray` runs a job on a cluster",
    "-lm --load-mode": _LOADING,
    "-lzm --lazy-mode -dio --direct-io -ndio --no-direct-io": _LOADING,
    "-dev --device -sm --split-mode -ts --tensor-split -mg --main-gpu -ot "
    "--override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn --op-offload "
    "--no-op-offload -nopo -otd --override-tensor-draft --spec-draft-override-tensor -cmoed "
    "--cpu-moe-draft --spec-draft-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe "
    "--spec-draft-ncmoe -devd --device-draft --spec-draft-device": _DEVICES,
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl": (
        "-ngl is used for target and draft"
    ),
    "-fit --fit -fitt --fit-target -fitc --fit-ctx": "a context that does not fit is an error: --n-ctx",
    "--check-tensors --override-kv": "a file is used as it is; damaged ones are refused",
    "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
    "--control-vector-layer-range": _ADAPTERS,
    "-mu --model-url -dr --docker-repo": (
        "--model takes user/repo[:tag] or user/repo/file.gguf of the Hugging Face hub"
    ),
    "-hf -hfr -hfd -hfrd --hf-repo --hf-repo-draft --spec-draft-hf": (
        "`llamabranch pull user/repo:Q8_0` downloads a model"
    ),
    "-hff --hf-file": "name the file after the repository: --model user/repo/file.gguf",
    "-hft --hf-token": "set the environment variable HF_TOKEN",
    "--output-file": "use --output",
    "-cd": "--n-ctx is used for target and draft",
    "-a --alias --host --port --cors-origins --api-key --api-key-file -to --timeout --metrics --slots "
    "--no-slots": _SERVER,
    "--tags --reuse-port --path --cors-methods --cors-headers --cors-credentials --no-cors-credentials "
    "--api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy "
    "--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime "
    "--mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui "
    "--no-webui --ssl-key-file --ssl-cert-file --sse-ping-interval --threads-http --models-dir "
    "--models-preset --models-max --models-autoload --no-models-autoload -sps --slot-prompt-similarity "
    "--sleep-idle-seconds --server-base": _NOT_SERVED,
    "--props": "GET /props is answered; properties are options of `llamabranch serve`",
    "--jinja --no-jinja": "chat templates are always run by Jinja: --chat",
    "--chat-template-kwargs": "a template's variables are set by apply_chat_template in Python",
    "--reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget "
    "--reasoning-budget-message --reasoning-preserve --no-reasoning-preserve": _REASONING,
    "--skip-chat-parsing --no-skip-chat-parsing": "answers are never parsed",
    "--simple-io": "what is written to a pipe has no control codes",
    "--log-disable --log-file --log-jsonl --no-log-jsonl --log-prompts-dir --log-prefix --no-log-prefix "
    "--log-timestamps --no-log-timestamps": _NO_LOG,
    "-lv --verbosity --log-verbosity": _LOG,
    "--spec-draft-n-min --draft-min --draft-n-min --spec-draft-p-split --draft-p-split "
    "--spec-draft-p-min --draft-p-min": (
        "--draft-length auto drafts as long as it pays; --entropy-stop ends a draft where the draft "
        "model is unsure"
    ),
    "--draft-n": "--draft-length sets how many tokens to draft",
    "--spec-synth-len --spec-synth-rates": "`llamabranch theory` computes speeds from acceptance rates",
    "--spec-type --spec-default": "--draft takes a model, mtp, lookup, suffix, a chain, or auto",
    "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n "
    "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n "
    "--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n "
    "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m "
    "--spec-ngram-min-hits": _DRAFT_NGRAM,
    "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
    "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default "
    "--vision-gemma-4b-default --vision-gemma-12b-default": _PRESET,
    "-npl -npp -ntg -pps -tgs": "`llamabranch bench` measures drafting, and no batches",
    "-ofreq": "`llamabranch generate --output` appends each result as its text ends",
    "--kl-divergence": "`llamabranch kld` compares with log-probabilities that were saved",
    "-tps": "speeds are in the table, or --json",
}  # fmt: skip
# Click would read those of one dash as a short option with text behind it, as it reads -n128.
REFUSED: dict[str, str] = {name: hint for names, hint in _BY_HINT.items() for name in names.split()}
