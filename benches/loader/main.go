// Command loader measures skeg beside etcd: see benches/run, which builds what it needs and starts it.
//
//	loader run [-rows put,count] [-quick] [-write FILE]   all loads against both servers
//	loader load NAME [flags]                              one load against a running server
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"skeg.local/benches/compare"
	"skeg.local/benches/load"
	"skeg.local/benches/process"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "loader:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	switch {
	case len(arguments) > 0 && arguments[0] == "run":
		return runAll(ctx, arguments[1:])
	case len(arguments) > 1 && arguments[0] == "load":
		return runLoad(ctx, arguments[1], arguments[2:])
	}
	return fmt.Errorf("usage: loader run|load NAME [flags]")
}

func runLoad(ctx context.Context, name string, arguments []string) error {
	chosen, ok := load.Loads[name]
	if !ok {
		return fmt.Errorf("unknown load %q", name)
	}
	var settings load.Settings
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	settings.Flags(flags)
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	result, err := chosen(ctx, settings)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

func runAll(ctx context.Context, arguments []string) error {
	bench := compare.Bench{Etcd: os.Getenv("ETCD_BIN"), Skeg: os.Getenv("SKEG_BIN"), Progress: os.Stderr}
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	rows := flags.String("rows", "", "only the loads whose names start with one of these, separated by commas")
	write := flags.String("write", "", "write the tables into this file, between their markers")
	flags.BoolVar(&bench.Quick, "quick", false, "one short round of each")
	flags.IntVar(&bench.Nice, "nice", -10, "priority of servers and clients")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if bench.Etcd == "" || bench.Skeg == "" {
		return fmt.Errorf("ETCD_BIN and SKEG_BIN must name the servers: run benches/run")
	}
	bench.Tool = filepath.Join(filepath.Dir(bench.Etcd), "benchmark")
	bench.Etcdctl = filepath.Join(filepath.Dir(bench.Etcd), "etcdctl")
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bench.Self = self
	var wanted []string
	if *rows != "" {
		wanted = strings.Split(*rows, ",")
	}
	process.RaiseSession(bench.Nice)
	results, failure := bench.Run(ctx, wanted)
	for _, part := range []compare.Part{compare.OneMember, compare.ThreeMembers} {
		table := compare.Table(results, part == compare.ThreeMembers)
		fmt.Print(table)
		if *write != "" && table != "" {
			failure = errors.Join(failure, part.Write(*write, compare.Setting(revision(), bench.Quick), table))
		}
	}
	return failure
}

// revision names the commit that is measured.
func revision() string {
	output, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(output))
}
