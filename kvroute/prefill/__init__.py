"""How long prompts take to compute: an engine's speed, and the prompts that wait for it."""
