"""Deployment on Flower: `scaffold` writes an app, `party` is what its server and its clients run, and `rehearse` starts
all of it as processes of this machine, with the certificates and keys of `keys`."""
