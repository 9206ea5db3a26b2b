"""What a user reads besides errors: progress, warnings, how extras are installed."""
