"""HTTP: requests and answers in OpenAI's shapes, and a request's token ids."""
