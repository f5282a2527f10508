//! Optimizers, outer optimizers and overlaps on ranks that are threads.

mod common;

use std::io::{Cursor, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Instant;

use common::{alone, ranks};
use sotto::{
    events, Comm, Dtype, Gradient, Optimizer, Outer, Overlap, Param, StateMode, Status, Tensor, F16,
};

const ADAM: &str = r#"{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}"#;

fn adam(comm: &Comm) -> Optimizer {
    let params = vec![
        Param::new(vec![1.0f32; 100], vec![0.0f32; 100]).name("weights"),
        Param::new(vec![2.0f32; 10], Tensor::zeros::<f32>(10)),
    ];
    Optimizer::new(comm, ADAM, params).unwrap()
}

fn step(optimizer: &mut Optimizer, gradient: f32) {
    for (_, grad) in optimizer.pairs_mut::<f32>().unwrap() {
        grad.fill(gradient);
    }
    optimizer.step(()).unwrap().wait().unwrap();
}

#[test]
fn a_step_averages_and_updates() {
    let params = ranks(2, |comm| {
        let mut optimizer = adam(&comm);
        for i in 0..3 {
            step(&mut optimizer, comm.rank() as f32 + i as f32);
        }
        let info = optimizer.info().unwrap();
        assert_eq!((info.step, info.stage, optimizer.len()), (3, 0, 2));
        optimizer.set("lr", None, 0.0).unwrap();
        optimizer.set("weight_decay", Some(0), 0.0).unwrap();
        assert_eq!(optimizer.info().unwrap().lr, 0.0);
        assert!(optimizer.report("all").unwrap().contains("weights"));
        let before = optimizer.param(0).unwrap().to_vec();
        assert!(before[0] < 1.0);
        step(&mut optimizer, 1.0);
        assert_eq!(optimizer.param(0).unwrap(), before);
        let tensors = optimizer.into_params().unwrap();
        comm.close().unwrap();
        tensors.into_iter().map(|tensor| tensor.into_vec::<f32>().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(params[0], params[1]);
}

#[test]
fn halves_copies_masks_and_other_places() {
    let comm = alone();
    let param = Param::new(vec![1.0f32; 4], vec![F16(0x3c00); 4])
        .model_copy(vec![F16(0); 4])
        .mask(vec![1u8, 0, 1, 1]);
    let mut optimizer = Optimizer::new(&comm, ADAM, vec![param]).unwrap();
    optimizer.step(()).unwrap().wait().unwrap();
    let param = optimizer.param(0).unwrap().to_vec();
    assert_eq!(param, [0.9, 1.0, 0.9, 0.9].map(|x: f32| if x < 1.0 { param[0] } else { x }));
    assert_eq!(optimizer.model_copy::<F16>(0).unwrap()[1], F16(0x3c00));
    let wrong = optimizer.grad_mut::<f32>(0).unwrap_err();
    assert_eq!(wrong.text, "the tensor is of Float16, not of Float32");
    assert_eq!(optimizer.param(1).unwrap_err().text, "parameter 1 of 1; allowed: 0 to 0");

    let mut grads = [Tensor::from(vec![F16(0); 4])];
    optimizer.set_grads(&mut grads).unwrap();
    assert_eq!(grads[0].as_slice::<F16>().unwrap(), [F16(0x3c00); 4], "the former ones");
    let mut params = [Tensor::from(vec![5.0f32; 4])];
    let mut copies = [Tensor::from(vec![F16(0); 4])];
    optimizer.set_params(&mut params, &mut copies).unwrap();
    assert_eq!(params[0].as_slice::<f32>().unwrap(), param);
    optimizer.set_frozen(&[true]).unwrap();
    optimizer.step(()).unwrap().wait().unwrap();
    assert_eq!(optimizer.param(0).unwrap(), [5.0; 4]);
    let mut short = [Tensor::from(vec![0.0f32; 3])];
    let error = optimizer.set_params(&mut short, &mut []).unwrap_err();
    assert_eq!(error.status, Status::InvalidArgument);
    assert_eq!(optimizer.param(0).unwrap().len(), 4);
}

#[test]
fn accumulated_gradients_are_averaged() {
    let comm = alone();
    let (mut one, mut two) = (adam(&comm), adam(&comm));
    step(&mut one, 2.0);
    for gradient in [1.0, 3.0] {
        two.pairs_mut::<f32>().unwrap().into_iter().for_each(|(_, grad)| grad.fill(gradient));
        if gradient == 1.0 {
            two.accumulate(()).unwrap().wait().unwrap();
            assert_eq!(two.info().unwrap().micro_batches, 1);
        }
    }
    two.step(()).unwrap().wait().unwrap();
    assert_eq!(one.param(0).unwrap(), two.param(0).unwrap());
    two.synchronize(()).unwrap().wait().unwrap();
}

#[test]
fn what_is_not_finite_updates_nothing() {
    let comm = alone();
    let mut optimizer = adam(&comm);
    optimizer.grad_mut::<f32>(0).unwrap()[3] = f32::NAN;
    let error = optimizer.step(()).unwrap().wait().unwrap_err();
    assert_eq!(error.status, Status::Nonfinite);
    assert_eq!(optimizer.param(0).unwrap(), [1.0; 100]);
    step(&mut optimizer, 1.0);
}

#[test]
fn state_goes_on_bit_for_bit() {
    let comm = alone();
    let mut optimizer = adam(&comm);
    step(&mut optimizer, 1.0);
    optimizer.set_user_state(b"position").unwrap();
    for mode in [StateMode::Exact, StateMode::Common, StateMode::Mean, StateMode::Reset] {
        let state = optimizer.export_state(mode).unwrap();
        let mut streamed = Vec::new();
        optimizer.write_state(mode, &mut streamed).unwrap();
        assert_eq!(streamed, state);
        let mut other = adam(&comm);
        other.import_state(mode, &state).unwrap();
        assert_eq!(other.user_state().unwrap(), b"position");
        let mut file = Cursor::new([b"header".to_vec(), state].concat());
        file.set_position(6);
        let mut third = adam(&comm);
        third.read_state(mode, &mut file).unwrap();
        step(&mut other, 2.0);
        step(&mut third, 2.0);
        assert_eq!(other.param(1).unwrap(), third.param(1).unwrap());
    }
    let error = optimizer.import_state(StateMode::Exact, b"no state").unwrap_err();
    assert_eq!(error.status, Status::InvalidArgument);
}

/// Fails, or panics, at its second part.
struct Broken {
    parts: u32,
    panics: bool,
}

impl Write for Broken {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.parts += 1;
        if self.parts == 1 {
            return Ok(data.len());
        }
        assert!(!self.panics, "the disk panics");
        Err(std::io::Error::new(std::io::ErrorKind::Other, "the disk is full"))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_writer_may_fail_or_panic() {
    let comm = alone();
    let params = vec![Param::new(vec![1.0f32; 300_000], vec![0.0f32; 300_000])];
    let mut optimizer = Optimizer::new(&comm, ADAM, params).unwrap();
    let mut broken = Broken { parts: 0, panics: false };
    let error = optimizer.write_state(StateMode::Exact, &mut broken).unwrap_err();
    assert_eq!(error.to_string(), "CANCELLED: write failed: the disk is full");
    broken = Broken { parts: 0, panics: true };
    let write = || optimizer.write_state(StateMode::Exact, &mut broken);
    let panic = catch_unwind(AssertUnwindSafe(write)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"the disk panics"));
    step(&mut optimizer, 1.0);
    let empty = optimizer.read_state(StateMode::Exact, &mut Cursor::new([])).unwrap_err();
    assert_eq!(empty.status, Status::InvalidArgument);
}

#[test]
fn arrays_of_a_checkpoint_are_imported() {
    let comm = alone();
    let mut optimizer = adam(&comm);
    let (moment, step_number) = (Tensor::from(vec![0.5f32; 100]), Tensor::from(vec![7i64]));
    let rest = Tensor::from(vec![0.5f32; 10]);
    let arrays = [
        ("weights/exp_avg", &moment),
        ("weights/exp_avg_sq", &moment),
        ("weights/step", &step_number),
        ("param1/exp_avg", &rest),
        ("param1/exp_avg_sq", &rest),
        ("param1/step", &step_number),
    ];
    optimizer.import_arrays(&arrays).unwrap();
    assert_eq!(optimizer.info().unwrap().step, 7);
    let error = optimizer.import_arrays(&[("weights/exp_avh", &moment)]).unwrap_err();
    assert!(error.text.contains("exp_avh"), "{error}");
}

#[test]
fn a_step_that_is_forgotten_keeps_its_memory() {
    ranks(2, |comm| {
        let mut optimizer = adam(&comm);
        let wait_for_the_other = comm.split(Some(0), 0).unwrap().unwrap();
        if comm.rank() == 1 {
            wait_for_the_other.barrier(()).unwrap().wait().unwrap();
            step(&mut optimizer, 1.0);
            wait_for_the_other.barrier(()).unwrap().wait().unwrap();
            let again = optimizer.step(()).unwrap();
            drop(again);
            optimizer.close().unwrap(); // waits for it
            return;
        }
        std::mem::forget(optimizer.step(()).unwrap());
        assert_eq!(optimizer.param(0).unwrap_err().status, Status::Busy);
        assert_eq!(optimizer.grad_mut::<f32>(0).unwrap_err().status, Status::Busy);
        assert_eq!(optimizer.step(()).unwrap_err().status, Status::Busy);
        wait_for_the_other.barrier(()).unwrap().wait().unwrap();
        while optimizer.param(0).is_err() {
            std::thread::yield_now();
        }
        std::mem::forget(optimizer.step(()).unwrap());
        let begin = Instant::now();
        drop(optimizer);
        assert!(begin.elapsed() < common::LIMIT / 2, "dropping does not wait for the step");
        assert!(sotto::left_behind() > 0);
        wait_for_the_other.barrier(()).unwrap().wait().unwrap();
    });
    common::nothing_is_left_behind();
}

#[test]
fn what_needs_a_device_says_so() {
    let comm = alone();
    let mut optimizer = adam(&comm);
    let op = comm.all_reduce(vec![1.0f32], ()).unwrap();
    let refused = unsafe { op.stream_wait(std::ptr::null_mut()) };
    assert_eq!(refused.unwrap_err().status, Status::Unsupported);
    let step = optimizer.step(()).unwrap();
    let refused = unsafe { step.stream_wait(std::ptr::null_mut()) };
    assert_eq!(refused.unwrap_err().status, Status::Unsupported);
    step.wait().unwrap();
    let not_recorded = unsafe { optimizer.record(()) }.unwrap(); // no stream is being captured
    while optimizer.param(0).is_err() {
        std::thread::yield_now(); // it is a step like others
    }
    assert_eq!(optimizer.replay(&not_recorded).unwrap_err().status, Status::InvalidState);
    drop(not_recorded);
    let mut device = unsafe {
        let data = 0x1000 as *mut std::ffi::c_void;
        Tensor::lent_at(data, 1, Dtype::Float32, sotto::Device::Cuda(0))
    };
    assert_eq!(device.as_slice::<f32>().unwrap_err().status, Status::InvalidArgument);
    assert_eq!(device.as_mut_slice::<f32>().unwrap_err().status, Status::InvalidArgument);
    assert!(comm.all_reduce(device, ()).is_err());
}

#[test]
fn bad_configurations_name_their_key() {
    let comm = alone();
    let param = || vec![Param::new(vec![1.0f32; 4], vec![0.0f32; 4])];
    let json = r#"{"optimizer": {"type": "Adam", "params": {"lrr": 1}}}"#;
    let error = Optimizer::new(&comm, json, param()).unwrap_err();
    assert!(error.status == Status::InvalidArgument && error.text.contains("lrr"), "{error}");
    let short = vec![Param::new(vec![1.0f32; 4], vec![0.0f32; 3])];
    let error = Optimizer::new(&comm, ADAM, short).unwrap_err();
    assert_eq!(error.text, "params[0].grad has 3 elements, its parameter has 4");
    let mut optimizer = Optimizer::new(&comm, ADAM, param()).unwrap();
    assert_eq!(optimizer.outer().err().unwrap().status, Status::InvalidState);
    assert_eq!(optimizer.set("speed", None, 1.0).unwrap_err().status, Status::InvalidArgument);
    assert_eq!(optimizer.set_frozen(&[]).unwrap_err().status, Status::InvalidArgument);
    let error = Outer::new(&comm, r#"{"preset": "co3"}"#, vec![Param::live(vec![1.0f32])]);
    assert!(error.unwrap_err().text.contains("co3"));
    let error = Overlap::new(&comm, r#"{"bucket": 1}"#, vec![vec![1.0f32].into()]).unwrap_err();
    assert!(error.text.contains("bucket"), "{error}");
}

#[test]
fn outer_steps_average_what_local_steps_change() {
    let ends = ranks(2, |comm| {
        let json = r#"{"preset": "local_sgd", "period": 2}"#;
        let mut outer = Outer::new(&comm, json, vec![Param::live(vec![0.0f32; 50])]).unwrap();
        let (mut seen, mut saved) = (0, Vec::new());
        for i in 0..6 {
            outer.param_mut(0).unwrap().iter_mut().for_each(|x| *x += comm.rank() as f32);
            outer.set("loss", 1.0).unwrap();
            outer.vote(1 << comm.rank()).unwrap();
            outer.step(()).unwrap().wait().unwrap();
            seen |= outer.info().unwrap().events;
            if i == 3 {
                saved = outer.export_state(StateMode::Exact).unwrap();
            }
        }
        assert_ne!(seen & events::CONSUMED, 0);
        let live = outer.param(0).unwrap().to_vec();
        outer.swap(()).unwrap().wait().unwrap();
        assert_eq!(outer.step(()).unwrap_err().status, Status::InvalidState);
        outer.swap(()).unwrap().wait().unwrap();
        assert_eq!(outer.param(0).unwrap(), live);
        outer.flush(()).unwrap().wait().unwrap();
        let end = outer.param(0).unwrap()[0];
        outer.import_state(StateMode::Exact, &saved).unwrap();
        assert_eq!(outer.info().unwrap().step, 4);
        outer.close().unwrap();
        end
    });
    assert_eq!(ends, [3.0, 3.0]);
}

// The mean of 0 and 1 in 16 elements is 2 long, and 1 is allowed.
#[test]
fn outer_steps_take_norms_over_shards() {
    let ends = ranks(4, |comm| {
        let json = r#"{"preset": "co2", "period": 1, "delay": 0, "penalty": "none", "beta": 0,
                       "auto_floor": false, "clip": "norm", "phi": 1}"#;
        let (replica, shard) = (comm.rank() / 2, comm.rank() % 2);
        let same = comm.split(Some(shard), 0).unwrap().unwrap();
        let shards = comm.split(Some(replica), 0).unwrap().unwrap();
        let param = Param::live(vec![0.0f32; 8]);
        let mut outer = Outer::sharded(&same, &shards, json, vec![param]).unwrap();
        drop(shards);
        outer.param_mut(0).unwrap().iter_mut().for_each(|x| *x += replica as f32);
        outer.step(()).unwrap().wait().unwrap();
        let end = outer.param(0).unwrap()[0];
        outer.close().unwrap();
        end
    });
    assert_eq!(ends, [0.25; 4]);
}

#[test]
fn an_optimizer_may_have_outer_steps() {
    ranks(2, |comm| {
        let json = r#"{"optimizer": {"type": "Adam", "params": {"lr": 0.1}},
                       "sotto": {"outer": {"preset": "co2", "period": 2}}}"#;
        let param = Param::new(vec![1.0f32; 10], vec![1.0f32; 10]);
        let mut optimizer = Optimizer::new(&comm, json, vec![param]).unwrap();
        for _ in 0..4 {
            optimizer.step(()).unwrap().wait().unwrap();
        }
        let mut outer = optimizer.outer().unwrap();
        outer.vote(5).unwrap();
        outer.flush(()).unwrap().wait().unwrap();
        assert_eq!(outer.info().unwrap().step, 4);
        outer.swap(()).unwrap().wait().unwrap();
        outer.swap(()).unwrap().wait().unwrap();
        assert_eq!(outer.set("speed", 1.0).unwrap_err().status, Status::InvalidArgument);
        optimizer.close().unwrap();
    });
}

#[test]
fn gradients_are_averaged_as_they_become_ready() {
    ranks(2, |comm| {
        let r = comm.rank() as f32;
        let moving = Gradient::Moving { count: 5, dtype: Dtype::Float32 };
        let gradients =
            vec![vec![0.0f32; 100].into(), moving, vec![F16(0); 3].into(), vec![r; 2].into()];
        let mut overlap = Overlap::new(&comm, r#"{"unused": "zero"}"#, gradients).unwrap();
        for round_number in 1..3 {
            let mut round = overlap.begin(()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| round.ready_with::<f32>(0, |g| g.fill(2.0 * r)).unwrap());
                scope.spawn(|| round.ready_at(1, vec![r; 5]).unwrap());
            });
            round.ready(&[3]).unwrap();
            let again = round.ready_with::<f32>(0, |_| panic!("it is the library's"));
            assert_eq!(again.unwrap_err().status, Status::InvalidState);
            assert_eq!(round.ready(&[9]).unwrap_err().status, Status::InvalidArgument);
            assert_eq!(
                round.ready_at(2, vec![F16(0); 3]).unwrap_err().status,
                Status::InvalidArgument
            );
            assert_eq!(round.info().unwrap().missing, 1);
            if round_number == 1 {
                round.unused(&[2]).unwrap();
            }
            round.finish().unwrap();
            assert!(round.ready(&[2]).is_err());
            round.wait().unwrap();
            assert_eq!(overlap.gradient_mut::<f32>(0).unwrap(), [1.0; 100]);
            assert_eq!(overlap.gradient_mut::<F16>(2).unwrap(), [F16(0); 3]);
            assert_eq!(overlap.take(1).unwrap().into_vec::<f32>().unwrap(), [0.5; 5]);
            assert!(overlap.gradient_mut::<f32>(1).is_err(), "it was taken");
            assert_eq!(overlap.take(0).unwrap_err().status, Status::InvalidArgument);
            assert_eq!(overlap.info().unwrap().rounds, round_number);
        }
        assert!(overlap.report("buckets").unwrap().contains("bytes"));
        assert_eq!(overlap.export_state(StateMode::Exact).unwrap_err().status, {
            Status::InvalidState
        });
        overlap.close().unwrap();
    });
}

#[test]
fn a_round_that_is_dropped_ends_on_all_ranks() {
    ranks(2, |comm| {
        let json = r#"{"codec": "onebit"}"#;
        let mut overlap = Overlap::new(&comm, json, vec![vec![1.0f32; 100].into()]).unwrap();
        let round = overlap.begin(()).unwrap();
        if comm.rank() == 0 {
            drop(round);
        } else {
            let mut round = round;
            round.ready(&[0]).unwrap();
            round.finish().unwrap();
            let error = round.wait().unwrap_err();
            assert_eq!(error.status, Status::Cancelled);
            assert!(error.text.contains("dropped before it was finished"), "{error}");
        }
        while overlap.gradient_mut::<f32>(0).is_err() {
            std::thread::yield_now();
        }
        let unfinished = overlap.begin(()).unwrap();
        assert_eq!(unfinished.wait().unwrap_err().status, Status::InvalidState);
        while overlap.gradient_mut::<f32>(0).is_err() {
            std::thread::yield_now();
        }
        let state = overlap.export_state(StateMode::Exact).unwrap();
        overlap.import_state(StateMode::Exact, &state).unwrap();
        std::mem::forget(overlap.begin(()).unwrap());
        drop(overlap);
    });
}

#[test]
fn the_log_goes_where_it_is_sent() {
    let comm = alone();
    let json = r#"{"optimizer": {"type": "OneBitAdam", "params": {"eps_inside_sqrt": true}}}"#;
    let warned = || vec![Param::new(vec![1.0f32; 4], vec![0.0f32; 4])];
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let sink = move |level, message: &str| {
        if message.contains("eps_inside_sqrt") {
            assert_eq!(level, sotto::Level::Warning);
            counted.fetch_add(1, Ordering::SeqCst);
            panic!("in a sink, on purpose");
        }
    };
    sotto::set_log(Some(sotto::Level::Warning), sink).unwrap();
    Optimizer::new(&comm, json, warned()).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 1);
    sotto::log_to_stderr(Some(sotto::Level::Error)).unwrap();
    let begin = Instant::now();
    while Arc::strong_count(&count) > 1 {
        assert!(begin.elapsed() < common::LIMIT, "the sink is dropped when it is replaced");
    }
    Optimizer::new(&comm, json, warned()).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 1);
    sotto::log_to_stderr(None).unwrap();
}

#[test]
fn a_step_may_begin_before_its_gradients_are_there() {
    ranks(2, |comm| {
        let (mut one, mut two) = (adam(&comm), adam(&comm));
        assert_eq!(two.begin(()).err().unwrap().status, Status::InvalidState);
        let error = two.overlap(Some(r#"{"bucket_byte": 1}"#)).unwrap_err();
        assert!(error.text.contains("bucket_byte"), "{error}");
        two.overlap(Some(r#"{"bucket_bytes": 100, "first_bucket_bytes": 40}"#)).unwrap();
        for i in 0..3 {
            let gradient = (comm.rank() + i) as f32;
            step(&mut one, gradient);
            let mut round = two.begin(()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| round.ready_with::<f32>(1, |g| g.fill(gradient)).unwrap());
                scope.spawn(|| match i {
                    0 => round.ready_at(0, vec![gradient; 100]).unwrap(),
                    _ => round.ready_with::<f32>(0, |g| g.fill(gradient)).unwrap(),
                });
            });
            assert_eq!(round.ready(&[1]).unwrap_err().status, Status::InvalidState);
            round.finish().unwrap();
            round.wait().unwrap();
            assert_eq!(one.param(0).unwrap(), two.param(0).unwrap());
            assert_eq!(one.param(1).unwrap(), two.param(1).unwrap());
            let given = two.take_gradient(0);
            assert_eq!(given.is_ok(), i == 0, "what the optimizer has is not given away");
        }
        let info = two.overlap_info().unwrap();
        assert_eq!((info.rounds, info.missing), (3, 0));
        assert!(info.early_payload_bytes_per_round > 0);
        assert!(two.overlap_report("all").unwrap().contains("hidden"));

        std::mem::forget(two.begin(()).unwrap()); // both ranks: open until it is withdrawn
        assert_eq!(two.param(0).unwrap_err().status, Status::Busy);
        assert_eq!(two.step(()).unwrap_err().status, Status::Busy);
        drop(two);
        step(&mut one, 1.0);
    });
    common::nothing_is_left_behind();
}
