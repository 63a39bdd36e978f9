// Command start runs a stock Kubernetes control plane until it is interrupted: a store of its own, or the one whose URLs it
// is given, then kube-apiserver, kube-controller-manager and kube-scheduler. scripts/control-plane calls it with the binaries.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"skeg.local/boot"
)

func main() {
	var options boot.Options
	endpoints := flag.String("endpoints", "", "client URLs of a running store, with commas; none: start -store")
	store := flag.String("store", "", "the store's binary (skeg, or etcd)")
	flag.StringVar(&options.Binaries, "kubernetes", "", "folder of the Kubernetes binaries")
	flag.StringVar(&options.Folder, "folder", "control-plane.skeg", "folder for data, certificates and logs; kept, and used again by the next start")
	flag.IntVar(&options.Port, "port", 6443, "port of kube-apiserver on loopback")
	flag.Parse()
	options.Controllers = true
	options.APIServerFlags = flag.Args()

	interrupted, release := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer release()
	if err := run(interrupted, options, *endpoints, *store); err != nil {
		fmt.Fprintln(os.Stderr, "control-plane:", err)
		os.Exit(1)
	}
}

func run(interrupted context.Context, options boot.Options, endpoints, binary string) (err error) {
	folder, err := filepath.Abs(options.Folder)
	if err != nil {
		return err
	}
	options.Folder = folder
	ended := make(chan string, 8)
	watch := func(name string, process *boot.Process) {
		go func() { <-process.Exited(); ended <- name }()
	}

	if endpoints != "" {
		options.Stores = strings.Split(endpoints, ",")
	} else {
		store, err := boot.NewStore(binary, folder)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, store.Stop()) }()
		if err := store.Start(); err != nil {
			return err
		}
		watch("the store", store.Process())
		options.Stores = []string{store.URL()}
		fmt.Println("store:     ", store.URL())
	}
	plane, err := boot.Start(options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	for _, process := range plane.Processes() {
		watch(process.Name(), process)
	}
	fmt.Println("apiserver: ", plane.URL())
	fmt.Println("kubeconfig:", plane.Kubeconfig())
	fmt.Printf("try:        %s --kubeconfig %s get namespaces\n", filepath.Join(options.Binaries, "kubectl"), plane.Kubeconfig())
	fmt.Println("ctrl-C stops all of it; the data stays in", folder)

	select {
	case <-interrupted.Done():
		return nil
	case name := <-ended:
		return fmt.Errorf("%s ended by itself; its log is in %s", name, folder)
	}
}
