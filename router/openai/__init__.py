"""REST endpoints in the shape of the OpenAI API."""
