package kubernetes

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// TestDeployment brings three pods to Running without a runtime: controllers and scheduler are stock, the node is this test, which
// reports what a kubelet would.
func TestDeployment(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	nodes := c.client.CoreV1().Nodes()
	node, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "node-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nodes.Delete(context.Background(), node.Name, metav1.DeleteOptions{}) }()
	capacity := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("100"),
	}
	node.Status = corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity,
		Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Tested",
			LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		}},
	}
	eventually(t, 10*time.Second, func() error {
		current, err := nodes.Get(t.Context(), node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		current.Status = node.Status
		_, err = nodes.UpdateStatus(t.Context(), current, metav1.UpdateOptions{})
		return err
	})

	c.run(t, "", "--namespace="+namespace, "create", "deployment", "sails", "--image=skeg.local/none:1", "--replicas=3")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	defer func() { cancel(); <-ended }()
	go func() {
		defer close(ended)
		kubelet(ctx, c, namespace, node.Name)
	}()
	c.run(t, "", "--namespace="+namespace, "rollout", "status", "deployment/sails", "--timeout=50s")

	c.run(t, "", "--namespace="+namespace, "scale", "deployment/sails", "--replicas=1")
	pods := c.client.CoreV1().Pods(namespace)
	eventually(t, 30*time.Second, func() error {
		left, err := pods.List(t.Context(), metav1.ListOptions{})
		if err != nil || len(left.Items) != 1 || left.Items[0].Status.Phase != corev1.PodRunning {
			return fmt.Errorf("%d pods, %v", len(left.Items), err)
		}
		return nil
	})
	// Garbage collection follows owners: the deployment's replica set and its pods go with it.
	c.run(t, "", "--namespace="+namespace, "delete", "deployment", "sails")
	eventually(t, 30*time.Second, func() error {
		left, err := pods.List(t.Context(), metav1.ListOptions{})
		if err != nil || len(left.Items) != 0 {
			return fmt.Errorf("%d pods are left, %v", len(left.Items), err)
		}
		return nil
	})
}

// kubelet reports pods that are bound to the node as running, and ends those that are to be deleted.
func kubelet(ctx context.Context, c *cluster, namespace, node string) {
	pods := c.client.CoreV1().Pods(namespace)
	mine := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()}
	now := int64(0)
	for ctx.Err() == nil {
		bound, err := pods.List(ctx, mine)
		if err != nil {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		for at, pod := range bound.Items {
			switch {
			case pod.DeletionTimestamp != nil:
				_ = pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}) // tried again in the next round
			case pod.Status.Phase == corev1.PodPending:
				pod.Status = runningStatus(&pod, at)
				_, _ = pods.UpdateStatus(ctx, &pod, metav1.UpdateOptions{}) // tried again in the next round
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func runningStatus(pod *corev1.Pod, index int) corev1.PodStatus {
	started := metav1.Now()
	address := fmt.Sprintf("10.244.0.%d", index+2)
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, HostIP: "192.0.2.2", PodIP: address, PodIPs: []corev1.PodIP{{IP: address}}, StartTime: &started,
	}
	for _, condition := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{
			Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: started})
	}
	yes := true
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: container.Name, Image: container.Image, ImageID: container.Image, Ready: true, Started: &yes,
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: started}},
		})
	}
	return status
}
