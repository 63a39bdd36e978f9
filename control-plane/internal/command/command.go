// Package command lists the stock Kubernetes commands that this binary carries and finds the one asked for.
//
// The commands are made by Kubernetes' own constructors; nothing in them is replaced. One binary holds all three because
// they share almost all of their code: three binaries would be three times the size and the linking time.
package command

import (
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

var constructors = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

// Names returns the commands that Pick knows, sorted.
func Names() []string {
	names := make([]string, 0, len(constructors))
	for name := range constructors {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Pick finds the command that args, a whole argument vector, asks for and returns it with the arguments that are its own.
// A binary called by a command's name (a link to it) is that command; else the first argument names it.
// It returns nil when neither does.
func Pick(args []string) (*cobra.Command, []string) {
	for at := range min(2, len(args)) {
		if constructor, known := constructors[filepath.Base(args[at])]; known {
			return constructor(), args[at+1:]
		}
	}
	return nil, nil
}
