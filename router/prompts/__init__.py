"""Renders prompts into token ids, with the model's own tokenizer and chat template."""
