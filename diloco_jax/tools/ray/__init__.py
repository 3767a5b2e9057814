"""Islands on a Ray cluster: each is a placement group, which Ray admits when its resources exist."""
