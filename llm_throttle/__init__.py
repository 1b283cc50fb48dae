"""A fair, bounded waiting room in front of an LLM provider, for Django."""
