"""Services, plans and manifests."""
