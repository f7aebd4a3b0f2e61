"""The part of OpenAI's interface that language models without chat can serve, and vLLM's additions to it."""
