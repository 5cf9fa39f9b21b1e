"""Text to tokens and back; engines know neither text nor templates."""
