"""The tiers: where slabs live, and until when."""
