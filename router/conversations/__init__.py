"""Stored responses and conversations of the Responses API, and how calls continue them."""
