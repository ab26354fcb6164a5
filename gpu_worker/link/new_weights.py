"""Answers an order to load new weights. Owns nothing."""

from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.link.plan_runner import PlanRunner


def answer_of(order: pb.LoadWeights, runner: PlanRunner, join: pb.Join) -> bytes:
    """Loads the weights, and returns the frame of the answer. Later Joins name the version. Passes on fatal errors."""
    if runner.weights is None:
        loaded = pb.WeightsLoaded(version=order.version, ok=False, detail="this worker cannot load new weights")
    else:
        loaded = runner.weights.load(order)
    if loaded.ok:
        join.weights_version, join.weights_folder = order.version, order.folder
    return pb.WorkerToCore(weights_loaded=loaded).SerializeToString()
