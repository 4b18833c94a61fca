"""An OpenAI-compatible server whose workers share their prompts' states."""
