"""Command-line tools: one question each, over the shmcache library."""
