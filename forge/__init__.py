"""The orchestrator: recipes, campaign loop, proposers and prompts, programs, reports, command line."""
