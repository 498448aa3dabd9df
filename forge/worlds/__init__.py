"""Generated worlds in which the true cause of a gain is known, and how the rule of verdicts fares in them."""
