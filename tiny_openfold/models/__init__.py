"""The trained model of --contacts and --fold, families.pt; README.md is its card."""
