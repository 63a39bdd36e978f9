package compare

import (
	"fmt"
	"slices"
	"strings"
)

// Table sets the medians against each other, a row per goal that was measured on one member, or on clusters. It is empty if nothing was.
func Table(results Results, cluster bool) string {
	var text strings.Builder
	text.WriteString("| work | figure | skeg / etcd | must be | | skeg | etcd 3.7.3 |\n|---|---|---|---|---|---|---|\n")
	measured := false
	for _, scenario := range Scenarios() {
		samples, ok := results[scenario.Name]
		if !ok || scenario.Cluster != cluster {
			continue
		}
		measured = true
		for _, goal := range scenario.Goals {
			row(&text, goal, results, samples)
		}
	}
	if !measured {
		return ""
	}
	return text.String()
}

func row(text *strings.Builder, goal Goal, results Results, samples map[string][]Sample) {
	skeg, haveSkeg := median(samples["skeg"], goal.Figure)
	etcd, haveEtcd := median(samples["etcd"], goal.Figure)
	other := show(etcd, goal.Figure)
	if goal.Against != "" {
		for _, all := range results {
			if found, ok := median(all["skeg"], goal.Against); ok {
				etcd, haveEtcd = found, true
				other = show(found, goal.Against) + " (skeg, " + strings.SplitN(goal.Against, ".", 2)[0] + ")"
			}
		}
	}
	if !haveSkeg {
		return
	}
	ratio, shown := 0.0, "–"
	switch {
	case goal.Absolute:
		ratio = skeg
	case haveEtcd && etcd > 0:
		ratio = skeg / etcd
		shown = fmt.Sprintf("%.2f", ratio)
		if ratio < 0.1 {
			shown = fmt.Sprintf("%.4f", ratio)
		}
	default:
		return
	}
	if !haveEtcd {
		other = "–"
	}
	bound, verdict := "–", ""
	unit := ""
	if goal.Absolute {
		unit = " " + unitOf(goal.Figure)
	}
	switch {
	case goal.Zero:
		bound, verdict = "0"+unit, met(ratio == 0)
	case goal.Least > 0:
		bound, verdict = fmt.Sprintf("≥ %g%s", goal.Least, unit), met(ratio >= goal.Least)
	case goal.Most > 0:
		bound, verdict = fmt.Sprintf("≤ %g%s", goal.Most, unit), met(ratio <= goal.Most)
	}
	fmt.Fprintf(text, "| %s | %s | **%s** | %s | %s | %s | %s |\n",
		goal.Work, goal.What, shown, bound, verdict, show(skeg, goal.Figure), other)
}

func met(ok bool) string {
	if ok {
		return "met"
	}
	return "**missed**"
}

func median(samples []Sample, figure string) (float64, bool) {
	var found []float64
	for _, sample := range samples {
		if value, ok := sample[figure]; ok {
			found = append(found, value)
		}
	}
	if len(found) == 0 {
		return 0, false
	}
	slices.Sort(found)
	middle := len(found) / 2
	if len(found)%2 == 0 {
		return (found[middle-1] + found[middle]) / 2, true
	}
	return found[middle], true
}

func unitOf(figure string) string {
	unit := figure[strings.LastIndexByte(figure, '_')+1:]
	switch unit {
	case "s":
		if strings.HasSuffix(figure, "per_s") {
			return "/s"
		}
	case "us":
		return "µs"
	}
	return unit
}

func show(value float64, figure string) string {
	precision := 0
	switch {
	case unitOf(figure) == "writes":
		// A count.
	case value < 10:
		precision = 2
	case value < 100:
		precision = 1
	}
	return fmt.Sprintf("%.*f %s", precision, value, unitOf(figure))
}
