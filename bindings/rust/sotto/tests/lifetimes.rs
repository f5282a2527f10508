//! Who keeps what alive, and for how long.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use common::{alone, context, nothing_is_left_behind, ranks, LIMIT};
use sotto::{
    Call, Codec, Comm, CommOptions, Context, Op, Optimizer, Outer, Overlap, Param, Round, Source,
    StateMode, Status, Step, Target, Tensor, Views,
};

const ADAM: &str = r#"{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}"#;

/// Memory that tells when it is freed.
struct Told {
    memory: Vec<u8>,
    freed: Arc<AtomicBool>,
}

impl Told {
    fn new(memory: Vec<u8>) -> (Told, Arc<AtomicBool>) {
        let freed = Arc::new(AtomicBool::new(false));
        (Told { memory, freed: Arc::clone(&freed) }, freed)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::SeqCst);
    }
}

unsafe impl Source for Told {
    fn read(&self, views: &mut Views) {
        self.memory.read(views);
    }
}

unsafe impl Target for Told {
    fn write(&mut self, views: &mut Views) {
        self.memory.write(views);
    }
}

/// `body(op, freed)` with a receive that completes when `body` has returned.
fn with_a_receive(body: impl Fn(Op<Told>, &AtomicBool) + Sync) {
    ranks(2, |comm| {
        if comm.rank() == 1 {
            comm.recv([0u8], 0, ()).unwrap().wait().unwrap();
            comm.send(vec![5u8; 1000], 0, ()).unwrap().wait().unwrap();
            return;
        }
        let (told, freed) = Told::new(vec![0u8; 1000]);
        body(comm.recv(told, 1, ()).unwrap(), &freed);
        assert!(!freed.load(Ordering::SeqCst), "the library may still write it");
        comm.send([0u8], 1, ()).unwrap().wait().unwrap();
        let begin = Instant::now();
        while !freed.load(Ordering::SeqCst) && begin.elapsed() < LIMIT {
            sotto::left_behind(); // every call looks after what was dropped
        }
        assert!(freed.load(Ordering::SeqCst));
    });
    nothing_is_left_behind();
}

#[test]
fn buffers_of_a_dropped_operation_live_until_it_has_ended() {
    with_a_receive(|op, _| {
        let begin = Instant::now();
        drop(op);
        assert!(begin.elapsed() < LIMIT / 2, "dropping does not wait for the operation");
    });
}

#[test]
fn buffers_of_an_operation_that_a_panic_unwinds_live_too() {
    with_a_receive(|op, _| {
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _op = op;
            panic!("on purpose");
        }));
        assert!(unwound.is_err());
    });
}

#[test]
fn buffers_come_back_when_they_are_waited_for() {
    let comm = alone();
    let (told, freed) = Told::new(vec![1u8; 10]);
    let told = comm.all_reduce(told, ()).unwrap().wait().unwrap();
    assert!(!freed.load(Ordering::SeqCst));
    assert_eq!(told.memory, [1; 10]);
    let (refused, freed) = Told::new(vec![1u8; 10]);
    assert!(comm.broadcast(refused, 7, ()).is_err());
    assert!(freed.load(Ordering::SeqCst), "nothing was started");
}

#[test]
fn forgotten_operations_do_no_harm() {
    ranks(2, |comm| {
        let (told, freed) = Told::new(vec![comm.rank() as u8; 100_000]);
        std::mem::forget(comm.all_reduce(told, ()).unwrap());
        comm.barrier(()).unwrap().wait().unwrap();
        assert!(!freed.load(Ordering::SeqCst), "it leaks");
        comm.close().unwrap();
    });
}

#[test]
fn the_order_of_drops_does_not_matter() {
    let context = context();
    let comm = Comm::new(&context, CommOptions::default().ranks(0, 1)).unwrap();
    drop(context);
    let part = comm.split(Some(0), 0).unwrap().unwrap();
    let mut codec = Codec::new(&comm, r#"{"type": "int8"}"#, &[10]).unwrap();
    let param = Param::new(vec![1.0f32; 10], vec![1.0f32; 10]);
    let mut optimizer = Optimizer::new(&comm, ADAM, vec![param]).unwrap();
    let mut overlap = Overlap::new(&comm, "{}", vec![vec![1.0f32; 10].into()]).unwrap();
    let op = comm.all_reduce(vec![1.0f32; 10], &codec).unwrap();
    drop(comm);
    part.barrier(()).unwrap().wait().unwrap();
    op.wait().unwrap();
    optimizer.step(()).unwrap().wait().unwrap();
    codec.export_state(StateMode::Exact).unwrap();
    let mut round = overlap.begin(()).unwrap();
    round.ready(&[0]).unwrap();
    round.finish().unwrap();
    round.wait().unwrap();
    drop((optimizer, part, overlap, codec));
}

#[test]
fn what_was_made_of_a_closed_comm_is_told_or_works() {
    let comm = alone();
    let param = Param::new(vec![1.0f32; 10], vec![1.0f32; 10]);
    let mut optimizer = Optimizer::new(&comm, ADAM, vec![param]).unwrap();
    let op = comm.all_reduce(vec![1.0f32; 10], ()).unwrap();
    comm.close().unwrap();
    assert_eq!(op.wait().unwrap(), [1.0; 10]);
    if let Err(error) = optimizer.step(()).and_then(|step| step.wait()) {
        assert_ne!(error.status, Status::Internal, "{error}");
    }
    optimizer.close().unwrap();
}

#[test]
fn what_is_left_does_not_hold_up_a_rank_that_it_waits_for() {
    let left = Barrier::new(2);
    ranks(2, |comm| {
        let json = r#"{"preset": "co2", "period": 1, "auto_floor": false, "beta": 0}"#;
        let params = vec![Param::live(vec![1.0f32; 10])];
        let mut outer = Outer::new(&comm, json, params).unwrap();
        if comm.rank() == 0 {
            outer.step(()).unwrap().wait().unwrap();
            assert_eq!(outer.info().unwrap().in_flight, 1, "an average is under way");
            let call = Call::new().on_done(move |_| drop(outer));
            alone().barrier(call).unwrap().wait().unwrap();
            left.wait();
            return;
        }
        left.wait();
        let begin = Instant::now();
        outer.step(()).unwrap().wait().unwrap(); // the other rank's average needs this one's
        assert!(begin.elapsed() < LIMIT / 2);
        outer.close().unwrap();
    });
    nothing_is_left_behind();
}

#[test]
fn what_threads_may_share() {
    fn both<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    both::<(Context, Comm, Op<Vec<f32>>, Optimizer, Outer, Overlap)>();
    both::<(Round<'_>, Step<'_>, Tensor)>();
    moved::<(Codec, CommOptions<'_>)>();
}

#[test]
fn a_comm_may_be_used_and_dropped_by_any_thread() {
    let comm = Arc::new(alone());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let comm = Arc::clone(&comm);
            scope.spawn(move || {
                for _ in 0..100 {
                    comm.all_reduce(vec![1.0f32; 50], ()).unwrap().wait().unwrap();
                    comm.counters().unwrap();
                }
            });
        }
    });
    assert_eq!(comm.counters().unwrap().ops_completed, 400);
    let op = comm.all_reduce(vec![1.0f32; 50], ()).unwrap();
    std::thread::spawn(move || op.wait().unwrap()).join().unwrap();
}
