"""What a replica says of itself in the index, as far as tests care."""

FACTS = {
    "block_size": 4,
    "capacity_blocks": 100,
    "max_model_len": 4096,
    "prefill_tokens_per_s": 1000.0,
    "attention_tokens": 1e9,  # as good as no attention: seconds are easy to tell
    "prefix_caching": True,
}
LOAD = {"running": 0, "waiting": 0, "used_blocks": 0}
