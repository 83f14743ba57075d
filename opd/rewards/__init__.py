"""Rewards by name: parsing and comparing answers, and running them if they are code."""
