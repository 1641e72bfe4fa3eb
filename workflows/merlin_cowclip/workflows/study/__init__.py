"""Values searched at a batch size itself: `tune`, and what it leaves."""
