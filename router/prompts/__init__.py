"""The model's own tokenizer and chat template turn text into token ids."""
