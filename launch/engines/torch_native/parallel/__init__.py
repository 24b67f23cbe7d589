"""Process groups, collectives, and the layouts over them."""
