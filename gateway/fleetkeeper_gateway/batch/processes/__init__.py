"""The worker processes of a replica, and what they and their parent say to one another."""
