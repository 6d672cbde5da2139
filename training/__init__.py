"""The training of the bundled models: text, tokenizer, target, draft, GGUF."""
