//! Collectives on ranks that are threads: results, types, options, bad input.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use common::{alone, context, ranks};
use sotto::{
    wait_all, wait_any, Bf16, Call, Codec, Collective, Comm, CommOptions, Context, ContextOptions,
    Error, Parts, Pending, Reduce, Source, StateMode, Status, Tensor, Views, F16,
};

fn status<T>(result: Result<T, Error>) -> Status {
    match result {
        Ok(_) => panic!("it was expected to fail"),
        Err(error) => error.status,
    }
}

#[test]
fn every_collective_has_its_result() {
    ranks(3, |comm| {
        let r = comm.rank() as i32;
        assert_eq!(comm.all_reduce(vec![r, 10], ()).unwrap().wait().unwrap(), [3, 30]);
        let kept = Arc::new(vec![r]);
        let (_, max) =
            comm.all_reduce_into(Arc::clone(&kept), vec![0], Reduce::Max).unwrap().wait().unwrap();
        assert_eq!((max, kept), (vec![2], Arc::new(vec![r])));
        assert_eq!(comm.broadcast([r; 4], 1, ()).unwrap().wait().unwrap(), [1; 4]);
        let (_, all) = comm.all_gather([r], vec![9; 3], ()).unwrap().wait().unwrap();
        assert_eq!(all, [0, 1, 2]);
        let (_, part) = comm.reduce_scatter(vec![1, 2, 3], vec![0], ()).unwrap().wait().unwrap();
        assert_eq!(part, [3 * (r + 1)]);
        let root = (r == 2).then(|| vec![0]);
        let (_, sum) = comm.reduce([r + 1], root, 2, Reduce::Prod).unwrap().wait().unwrap();
        assert_eq!(sum, (r == 2).then(|| vec![6]));
        let root = (r == 0).then(|| vec![0; 3]);
        let (_, all) = comm.gather([r], root, 0, ()).unwrap().wait().unwrap();
        assert_eq!(all, (r == 0).then(|| vec![0, 1, 2]));
        let root = (r == 1).then(|| vec![5, 6, 7]);
        let (_, part) = comm.scatter(root, [0], 1, ()).unwrap().wait().unwrap();
        assert_eq!(part, [5 + r]);
        let (_, out) = comm.all_to_all(vec![r; 3], vec![9; 3], ()).unwrap().wait().unwrap();
        assert_eq!(out, [0, 1, 2]);
        comm.barrier(()).unwrap().wait().unwrap();
        comm.close().unwrap();
    });
}

#[test]
fn what_is_read_may_be_a_part_of_what_is_written() {
    ranks(2, |comm| {
        let r = comm.rank() as u16;
        let mine = |values: [u16; 4]| vec![values.to_vec(), vec![]];
        let run = |collective: Collective<Vec<Vec<u16>>>| {
            comm.start(collective, ()).unwrap().wait().unwrap().remove(0)
        };
        let all = run(Collective::all_gather_in_place(mine([r, r + 1, r, r + 2])));
        assert_eq!(all, [0, 1, 1, 3]);
        let part = run(Collective::reduce_scatter_in_place(mine([1, 2, 3, 4])));
        assert_eq!(part[2 * r as usize..][..2], [[2, 4], [6, 8]][r as usize]);
        let turned = run(Collective::all_to_all_in_place(mine([r, r, r + 10, r + 10])));
        assert_eq!(turned, [[0, 0, 1, 1], [10, 10, 11, 11]][r as usize]);
        let sum = run(Collective::reduce_in_place(mine([1, 2, 3, r]), 1).unwrap());
        assert_eq!(sum[..3], [[1, 2, 3], [2, 4, 6]][r as usize]);
    });
}

#[test]
fn the_root_has_the_whole_and_the_others_their_part() {
    ranks(3, |comm| {
        let r = comm.rank();
        let run =
            |collective: sotto::Result<Collective<Vec<u16>>>| comm.start(collective?, ())?.wait();
        let whole = vec![9, 9, 20, 21, 9, 9];
        let given = if r == 1 { whole } else { vec![10 + r as u16, 11 + r as u16] };
        let expected = if r == 1 { vec![10, 11, 20, 21, 12, 13] } else { given.clone() };
        assert_eq!(run(Collective::gather_in_place(given, 1)).unwrap(), expected);
        let given = if r == 2 { vec![1, 2, 3, 4, 5, 6] } else { vec![9; 2] };
        let expected = [vec![1, 2], vec![3, 4], vec![1, 2, 3, 4, 5, 6]];
        assert_eq!(run(Collective::scatter_in_place(given, 2)).unwrap(), expected[r as usize]);
        let all = run(Collective::gather_in_place(vec![5; 3], 3));
        assert_eq!(all.unwrap_err().status, Status::InvalidArgument);
    });
}

#[test]
fn parts_may_have_different_counts() {
    ranks(2, |comm| {
        let r = comm.rank() as usize;
        let counts = || vec![Parts::from(vec![1, 2])];
        let mine = vec![r as u8; r + 1];
        let (_, all) = comm.all_gather_v(mine, vec![9u8; 3], counts(), ()).unwrap().wait().unwrap();
        assert_eq!(all, [0, 1, 1]);
        let (_, part) = comm
            .reduce_scatter_v(vec![1u16, 2, 3], vec![0u16; r + 1], counts(), ())
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(part, [vec![2], vec![4, 6]][r]);
        let apart = Parts { counts: vec![1, 1], offsets: Some(vec![2, 0]) };
        let (_, out) = comm
            .all_to_all_v(
                vec![r as i64, 7, r as i64 + 10],
                vec![9i64; 2],
                vec![apart],
                vec![Parts::from(vec![1, 1])],
                (),
            )
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(out, [[10, 11], [0, 1]][r]);
    });
}

#[test]
fn several_buffers_of_any_types_are_one_operation() {
    ranks(2, |comm| {
        let mixed = (
            vec![vec![1i8, 2], vec![]],
            Tensor::from(vec![1.5f64]),
            [(F16(0x3c00), Bf16(0x3f80))].map(|(half, _)| half), // 1.0
        );
        let (ints, double, half) = comm.all_reduce(mixed, ()).unwrap().wait().unwrap();
        assert_eq!(ints, [vec![2, 4], vec![]]);
        assert_eq!(double.into_vec::<f64>().unwrap(), [3.0]);
        assert_eq!(half, [F16(0x4000)]);
        let brain = comm.all_reduce(vec![Bf16(0x3f80); 3], ()).unwrap().wait().unwrap();
        assert_eq!(brain, [Bf16(0x4000); 3]);
        let words = comm.all_reduce(vec![1u32 << comm.rank()], Reduce::BitOr).unwrap();
        assert_eq!(words.wait().unwrap(), [3]);
    });
}

#[test]
fn lent_memory_is_worked_on_where_it_is() {
    let comm = alone();
    let mut x = vec![1.0f32, 2.0];
    let lent = unsafe { Tensor::lent(&mut x) };
    comm.all_reduce(lent, Reduce::Mean).unwrap().wait().unwrap();
    assert_eq!(x, [1.0, 2.0]);
}

#[test]
fn groups_start_together_and_give_their_buffers_back() {
    ranks(2, |comm| {
        let peer = 1 - comm.rank();
        let mut group = comm.group();
        let sent = group.add(Collective::send(vec![comm.rank()], peer).unwrap(), ());
        let received = group.add(Collective::recv(vec![9u32], peer).unwrap(), ());
        comm.barrier(()).unwrap().wait().unwrap(); // the group holds up no other call
        let mut kept = group.start(()).unwrap().wait().unwrap();
        assert_eq!(kept.take(received).unwrap(), [peer]);
        assert_eq!(kept.take(sent).unwrap(), [comm.rank()]);

        drop(comm.group());
        let mut group = comm.group();
        group.add(Collective::all_reduce(vec![1.0f32]), ());
        let wrong = Collective::all_reduce_into(vec![vec![1.0f32]; 2], vec![0.0f32]);
        group.add(wrong, ());
        let error = group.start(()).unwrap_err();
        assert_eq!(
            error.text,
            "collective 1 of the group: input has 2 buffers and output 1; they have to be as many"
        );
        assert_eq!(error.status, Status::InvalidArgument);
        let mut group = comm.group();
        group.add(Collective::broadcast(vec![1.0f32], 7).unwrap(), ());
        let error = group.start(()).unwrap_err();
        assert!(error.text.contains("collective 0 of the group: ") && error.text.contains("root"));
        assert!(kept.take(comm.group().add(Collective::barrier(), ())).is_none());
        comm.barrier(()).unwrap().wait().unwrap();
    });
}

#[test]
fn a_forgotten_group_holds_up_nobody() {
    ranks(2, |comm| {
        let mut group = comm.group();
        group.add(Collective::all_reduce(vec![1.0f32]), ());
        std::mem::forget(group);
        std::thread::scope(|scope| {
            scope.spawn(|| comm.barrier(()).unwrap().wait().unwrap());
        });
        assert_eq!(comm.counters().unwrap().ops_completed, 1);
        comm.close().unwrap();
    });
}

/// A buffer whose view cannot be taken.
struct Panics;

unsafe impl Source for Panics {
    fn read(&self, _: &mut Views) {
        panic!("on purpose");
    }
}

#[test]
fn a_group_that_a_panic_unwinds_starts_nothing() {
    let comm = alone();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut group = comm.group();
        group.add(Collective::all_reduce(vec![1.0f32]), ());
        group.add(Collective::send(Panics, 0).unwrap(), ());
        group.start(())
    }));
    assert!(unwound.is_err());
    assert_eq!(comm.all_reduce(vec![2.0f32], ()).unwrap().wait().unwrap(), [2.0]);
    assert_eq!(comm.counters().unwrap().ops_completed, 1);
}

#[test]
fn codecs_compress_and_keep_what_is_left_over() {
    let bytes = ranks(2, |comm| {
        let mut codec = Codec::new(&comm, r#"{"type": "onebit"}"#, &[1000]).unwrap();
        let x = vec![comm.rank() as f32; 1000];
        let x = comm.all_reduce(x, &codec).unwrap().wait().unwrap();
        assert!(x.iter().all(|&value| value == x[0]));
        let state = codec.export_state(StateMode::Exact).unwrap();
        assert!(state.len() > 4000);
        codec.import_state(StateMode::Exact, &state).unwrap();
        assert_eq!(codec.export_state(StateMode::Exact).unwrap(), state);
        assert_eq!(
            status(codec.import_state(StateMode::Exact, &state[..100])),
            Status::InvalidArgument
        );
        drop(codec);
        comm.counters().unwrap().payload_bytes_sent
    });
    assert!(bytes.iter().all(|&bytes| bytes < 500), "{bytes:?}");
}

#[test]
fn waits_for_one_and_for_all() {
    ranks(2, |comm| {
        if comm.rank() == 1 {
            comm.recv([0u8], 0, ()).unwrap().wait().unwrap();
            comm.send([1u8], 0, ()).unwrap().wait().unwrap();
            comm.send([2u16], 0, ()).unwrap().wait().unwrap();
            return;
        }
        let mut first = comm.recv([0u8], 1, ()).unwrap();
        let second = comm.recv(vec![0u16], 1, ()).unwrap();
        let both: [&dyn Pending; 2] = [&first, &second];
        let short = Some(Duration::from_millis(20));
        assert_eq!(wait_any(&both, short).unwrap(), None);
        assert!(!wait_all(&both, short).unwrap());
        assert!(!first.test().unwrap() && !first.wait_for(Duration::from_millis(1)).unwrap());
        first = first.into_buffers().unwrap_err();
        let mut asked = 0;
        let stop = || {
            asked += 1;
            asked == 2
        };
        assert!(!first.wait_unless(stop).unwrap());
        comm.send([0u8], 1, ()).unwrap().wait().unwrap();
        assert_eq!(wait_any(&[&first], None).unwrap(), Some(0));
        assert!(wait_all(&[&first, &second], None).unwrap());
        let stats = first.stats().unwrap();
        assert!(stats.end_ns > 0 && stats.exposed_ns > 0, "{stats:?}");
        assert_eq!((first.wait().unwrap(), second.wait().unwrap()), ([1], vec![2]));
    });
    assert_eq!(status(wait_any(&[], None)), Status::InvalidArgument);
    assert!(wait_all(&[], None).unwrap());
}

#[test]
fn done_runs_once_and_a_panic_of_it_stays_there() {
    let comm = alone();
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let call = Call::new().on_done(move |result| {
        result.unwrap();
        counted.fetch_add(1, Ordering::SeqCst);
    });
    comm.all_reduce(vec![1.0f32], call).unwrap().wait().unwrap();
    let call = Call::new().done_on_any_thread().on_done(|_| panic!("in a callback, on purpose"));
    comm.all_reduce(vec![1.0f32], call).unwrap().wait().unwrap();
    let call = Call::new().on_done(|_| std::panic::panic_any(PanicsAgain));
    comm.all_reduce(vec![1.0f32], call).unwrap().wait().unwrap();
    let counted = Arc::clone(&count);
    let call = Call::new().codec_is_refused().on_done(move |_| drop(counted));
    assert_eq!(status(comm.barrier(call)), Status::InvalidArgument);
    assert_eq!(Arc::strong_count(&count), 1, "what was never called is dropped");
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// What a callback has panicked with, and panics when it is dropped.
struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        panic!("dropped, on purpose");
    }
}

#[test]
fn an_error_has_its_text_whatever_its_callback_owns() {
    let comm = alone();
    let ended = alone().all_reduce(vec![1.0f32], ()).unwrap();
    let owned = (ended, alone());
    let call = Call::new().on_done(move |_| drop(owned));
    let error = comm.broadcast([1.0f32], 5, call).unwrap_err();
    assert!(error.text.contains("root is 5"), "{error}");
}

/// A call that the library refuses for a barrier.
trait Refused {
    fn codec_is_refused(self) -> Self;
}

impl Refused for Call<'_> {
    fn codec_is_refused(self) -> Self {
        self.reduce(Reduce::Max)
    }
}

#[test]
fn what_a_callback_drops_is_given_back_later() {
    let comm = alone();
    let codec = Codec::new(&comm, r#"{"type": "int8"}"#, &[10]).unwrap();
    let other = alone();
    let op = other.all_reduce(vec![1.0f32; 10], ()).unwrap();
    let call = Call::new().on_done(move |_| {
        assert_eq!(other.barrier(()).unwrap_err().status, Status::InvalidState);
        drop((codec, op, other));
    });
    comm.barrier(call).unwrap().wait().unwrap();
    common::nothing_is_left_behind();
    comm.close().unwrap();
}

#[test]
fn bad_input_is_told() {
    let comm = alone();
    for error in [
        comm.broadcast([1.0f32], 5, ()).unwrap_err(),
        comm.all_reduce_into([1.0f32; 2], [0.0f32], ()).unwrap_err(),
        comm.all_reduce([1.0f32], Reduce::BitOr).unwrap_err(),
        comm.all_gather_v([1u8], [0u8], vec![], ()).unwrap_err(),
        comm.all_gather_v([1u8], [0u8], vec![vec![1, 2].into()], ()).unwrap_err(),
        comm.abort("a\0b").unwrap_err(),
        comm.report("no such kind").unwrap_err(),
        comm.plan(r#"{"kind": "all_reduce", "x": 1}"#).unwrap_err(),
        Codec::new(&comm, r#"{"type": "onebit", "scala": 1}"#, &[1]).unwrap_err(),
        Comm::new(&context(), CommOptions::default().ranks(2, 2)).unwrap_err(),
        sotto::config_report("{", 0, 0).unwrap_err(),
    ] {
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        assert!(error.text.len() > 10, "{error}");
    }
    assert!(Codec::new(&comm, r#"{"type": "x", "scala": 1}"#, &[1])
        .unwrap_err()
        .to_string()
        .contains("x"));
    comm.barrier(()).unwrap().wait().unwrap(); // the comm is as it was
}

#[test]
fn a_context_without_a_thread_is_driven_by_polls() {
    let options = ContextOptions { cpu_threads: 1, no_progress_thread: true, max_ops: 4 };
    let context = Context::with(options).unwrap();
    let comm = Comm::new(&context, CommOptions::default().ranks(0, 1)).unwrap();
    let done = Arc::new(AtomicU32::new(0));
    let told = Arc::clone(&done);
    let call = Call::new().on_done(move |_| told.store(1, Ordering::SeqCst));
    let op = comm.all_reduce(vec![1.0f32; 100_000], call).unwrap();
    while done.load(Ordering::SeqCst) == 0 {
        context.poll(Duration::from_millis(1)).unwrap();
    }
    assert_eq!(op.wait().unwrap(), vec![1.0f32; 100_000]);
}

#[test]
fn an_all_gather_of_the_callers_sets_a_comm_up() {
    let gather = |input: &[u8], out: &mut [u8]| {
        out.copy_from_slice(input);
        Ok(())
    };
    let options = CommOptions::default().ranks(0, 1).all_gather(gather);
    assert_eq!(Comm::new(&context(), options).unwrap().size(), 1);
    let without = CommOptions::default().all_gather(gather);
    assert_eq!(status(Comm::new(&context(), without)), Status::InvalidArgument);
    let error = Error { status: Status::Transport, text: "the caller's own".into() };
    let given = error.clone();
    let options = CommOptions::default().ranks(0, 2).all_gather(move |_, _| Err(given.clone()));
    assert_eq!(Comm::new(&context(), options).unwrap_err(), error);
    let options = CommOptions::default().ranks(0, 2).all_gather(|_, _| panic!("on purpose"));
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Comm::new(&context(), options)));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"on purpose"));
}

#[test]
fn splits_reports_and_aborts() {
    let behind = std::sync::Barrier::new(3);
    ranks(3, |comm| {
        let color = (comm.rank() != 1).then_some(0);
        let part = comm.split(color, -(comm.rank() as i32)).unwrap();
        let found = part.as_ref().map(|part| (part.rank(), part.size()));
        assert_eq!(found, [Some((1, 2)), None, Some((0, 2))][comm.rank() as usize]);
        assert!(comm.report("all").unwrap().starts_with('{'));
        assert!(comm.plan(r#"{"kind": "barrier"}"#).unwrap().contains("payload"));
        comm.barrier(()).unwrap().wait().unwrap();
        behind.wait(); // an operation that is done here may be in progress elsewhere
        if comm.rank() == 0 {
            comm.abort("enough").unwrap();
        }
        let mut op = match comm.barrier(()) {
            Ok(op) => op,
            Err(error) => {
                assert_eq!(error.status, Status::Aborted);
                return;
            }
        };
        let error = op.wait_for(common::LIMIT).unwrap_err();
        assert_eq!(
            (error.status, comm.error().unwrap().status),
            (Status::Aborted, Status::Aborted)
        );
        assert!(error.text.contains("enough"), "{error}");
        assert!(op.into_buffers().is_ok(), "an operation that has failed gives them back too");
    });
}

#[test]
fn reports_need_no_group() {
    let config = r#"{"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}"#;
    let values = r#"{"optimizer.params.lr": 0.5}"#;
    assert!(sotto::config_resolve(config, Some(values)).unwrap().contains("0.5"));
    assert!(sotto::config_resolve(config, None).unwrap().contains("auto"));
    assert!(sotto::config_report(r#"{"optimizer": {"type": "Lamb"}}"#, 4, 10).unwrap().len() > 10);
    let asked = r#"{"params": 1000, "ranks": 2, "bandwidth_mbit": 100, "step_ms": 1}"#;
    assert!(sotto::predict_report(asked).unwrap().contains("co2"));
    assert!(sotto::build_info().unwrap().contains("tcp"));
    assert_eq!(sotto::abi_version().unwrap(), (0, 2));
    assert!(sotto::library_version().unwrap().starts_with("0.2"));
    assert!(context().report("all").unwrap().starts_with('{'));
    context().poll(Duration::from_millis(1)).unwrap();
    context().trace_span("data", 5, 7).unwrap();
    assert_eq!(status(context().trace_span("data", 7, 5)), Status::InvalidArgument);
}

#[test]
fn every_status_has_the_librarys_name() {
    let mut names = Vec::new();
    for code in -40..0 {
        let status = Status::from_code(code);
        assert_eq!(status.code(), Some(code));
        let name = sotto::status_name(code).unwrap();
        assert_eq!(status.name(), name);
        names.extend((name != "UNKNOWN").then_some(name));
    }
    assert_eq!(names.len(), 14);
}
