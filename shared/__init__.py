"""What all processes must agree on. Imports nothing of ours."""
