"""One prompt, one stream of chunks, from as many replicas as it takes."""
