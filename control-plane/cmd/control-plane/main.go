// Command control-plane is kube-apiserver, kube-controller-manager and kube-scheduler in one binary, all stock:
// called by one of those names (through a link) or with the name as its first argument, it is that command.
//
// The one thing it adds is for tests: CONSISTENCY_CHECK_PERIOD (a duration) sets how often kube-apiserver compares its
// watch caches with the store, which is every five minutes otherwise, longer than our test runs.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"
	_ "time/tzdata" // as in the stock commands: time zones of CronJobs

	"k8s.io/apiserver/pkg/storage/cacher/consistency"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // as in the stock commands: JSON logs
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // as in the stock commands: client metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // as in the stock commands: version metric

	"skeg.local/control-plane/internal/command"
)

func main() {
	picked, args := command.Pick(os.Args)
	if picked == nil {
		fmt.Fprintf(os.Stderr, "usage: %s {%s} [flags]\n", os.Args[0], strings.Join(command.Names(), "|"))
		os.Exit(2)
	}
	if text, set := os.LookupEnv("CONSISTENCY_CHECK_PERIOD"); set {
		period, err := time.ParseDuration(text)
		if err != nil || period <= 0 {
			fmt.Fprintf(os.Stderr, "CONSISTENCY_CHECK_PERIOD: want a positive duration, got %q\n", text)
			os.Exit(2)
		}
		consistency.CheckPeriod = period
	}
	picked.SetArgs(args)
	os.Exit(cli.Run(picked))
}
