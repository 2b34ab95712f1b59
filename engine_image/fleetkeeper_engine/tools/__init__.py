"""Commands of `fleetkeeper-engine` that supervise no pod, and a program of the image build."""
