module fleetkeeper.io/local/node/traefik

go 1.26.0

require github.com/traefik/traefik/v3 v3.6.12

// tests/support/node/traefik.py copies these two from the module cache, without the parts that cannot be had:
// the SDKs of DNS services for certificates, and the built dashboard.
replace (
	github.com/go-acme/lego/v4 => ./lego
	github.com/traefik/traefik/v3 => ./traefik
	github.com/abbot/go-http-auth => github.com/containous/go-http-auth v0.4.1-0.20200324110947-a37a7636d23e
	github.com/gorilla/mux => github.com/containous/mux v0.0.0-20250523120546-41b6ec3aed59
	github.com/mailgun/minheap => github.com/containous/minheap v0.0.0-20190809180810-6e71eb837595
)

exclude github.com/tencentcloud/tencentcloud-sdk-go v3.0.83+incompatible
