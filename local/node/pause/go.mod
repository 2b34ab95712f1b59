module fleetkeeper.io/local/node/pause

go 1.26.0
