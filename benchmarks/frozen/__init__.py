"""What two revisions are compared by: small jobs with everything fixed, their weights, what users see."""
