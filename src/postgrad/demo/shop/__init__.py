"""A task with two tools and two calls that are both needed: what does a number of things cost?"""
