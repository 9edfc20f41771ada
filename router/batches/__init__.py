"""Batches and their files: OpenAI's Files and Batch API, run by the routers."""
