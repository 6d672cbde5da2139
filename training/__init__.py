"""How the bundled pair of models was made: text, tokenizer, target, draft, GGUF."""
