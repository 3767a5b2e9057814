"""Faults on virtual time: simulated runs in which processes die, links break and disks lie."""
