"""Explores live state: the real course of many ranks, in every order, with faults everywhere."""
