"""The accuracy evaluation: what selection costs, and how well profiles predict it, on a real model and real texts."""
