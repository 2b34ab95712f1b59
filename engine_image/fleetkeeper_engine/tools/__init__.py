"""Commands of `fleetkeeper-engine` besides supervising a pod, and the program that an image build runs."""
