// Command fleetkeeper-node is one binary that holds the upstream Kubernetes components.
// The name it is called by (a link) or else the first word picks the component; what follows is
// the component's own command line, unchanged:
//
//	fleetkeeper-node kube-apiserver --etcd-servers=https://127.0.0.1:2379 ...
//	ln -s fleetkeeper-node kubectl; ./kubectl get pods
//
// Linking them into one binary costs one compilation and 145 MB instead of seven and 700 MB.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	_ "time/tzdata" // CronJobs name time zones

	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // credential plugins for kubectl
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// commands maps the first word to the function that runs the component and returns its exit code.
var commands = map[string]func() int{
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllermanager.NewControllerManagerCommand()) },
	"kube-proxy":              func() int { return cli.Run(proxy.NewProxyCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kubelet":                 func() int { return cli.Run(kubelet.NewKubeletCommand(context.Background())) },
	"kubectl":                 runKubectl,
}

// runKubectl prints errors the way kubectl's own main does; cli.Run would print them twice.
func runKubectl() int {
	// The verbosity counts from here on: building the command already reads plugins and .kuberc.
	_, err := logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	kubectlutil.CheckErr(err)
	kubectlutil.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
	return 0
}

// chosen returns the component that the command line asks for, with its own command line.
func chosen(args []string) (run func() int, rest []string) {
	if run, known := commands[filepath.Base(args[0])]; known {
		return run, args
	}
	if len(args) > 1 {
		return commands[args[1]], args[1:]
	}
	return nil, nil
}

func main() {
	run, rest := chosen(os.Args)
	if run == nil {
		names := slices.Sorted(maps.Keys(commands))
		fmt.Fprintf(os.Stderr, "usage: %s COMPONENT [ARGUMENT...]\ncomponents: %v\n", os.Args[0], names)
		os.Exit(2)
	}
	os.Args = rest
	os.Exit(run())
}
