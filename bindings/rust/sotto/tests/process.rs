//! Whole processes: loading, leaks, signals, forks, ranks that die.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{alone, context, launched, program, ranks, text, LIMIT};
use sotto::{
    Codec, Comm, CommOptions, Optimizer, Param, Result, Source, StateMode, Status, Target, Views,
};

const ADAM: &str = r#"{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}"#;
const SIGINT: i32 = 2;
const SIG_DFL: usize = 0;

extern "C" {
    fn signal(number: i32, handler: usize) -> usize;
    fn kill(process: i32, number: i32) -> i32;
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(code: i32) -> !;
    fn alarm(seconds: u32) -> u32;
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

fn handle_interrupts() {
    unsafe { signal(SIGINT, remember as extern "C" fn(i32) as usize) };
}

#[test]
#[ignore = "a process of the other tests"]
fn child() {
    match std::env::var("RUST_TESTS_CHILD").unwrap_or_default().as_str() {
        "load" => println!("{:?}", sotto::library_version()),
        "cycles" => cycles_leave_nothing_behind(),
        "forks" => forks(),
        "dies" => dies().unwrap(),
        "ends early" => ends_early().unwrap(),
        "receives" => receives(),
        "receives without a handler" => receives_without_a_handler(),
        "meets" => meets(),
        _ => {}
    }
}

// ---- loading

#[cfg(not(feature = "link"))]
mod loading {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// A library of one source, or None, with the reason printed, where nothing compiles it.
    fn stub(name: &str, source: &str) -> Option<PathBuf> {
        let folder = std::env::temp_dir().join(format!("sotto-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (c, library) = (folder.join("stub.c"), folder.join("libstub.so"));
        std::fs::write(&c, source).unwrap();
        let run =
            Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&c).status();
        match run {
            Ok(status) if status.success() => Some(library),
            other => {
                println!("left out: cc cannot make a stub library: {other:?}");
                None
            }
        }
    }

    /// What a process says that loads this library.
    fn load(library: Option<PathBuf>) -> Option<String> {
        let library = library?;
        let said = text(&program("load").env("SOTTO_LIBRARY", &library).output().unwrap());
        if let Some(folder) = library.parent().filter(|_| library.ends_with("libstub.so")) {
            std::fs::remove_dir_all(folder).unwrap();
        }
        Some(said)
    }

    fn expect(said: Option<String>, wanted: &str) {
        if let Some(said) = said {
            assert!(said.contains(wanted), "{said}");
            assert!(said.contains("status: LibraryLoad"), "{said}");
        }
    }

    #[test]
    fn another_abi_is_refused_with_both_numbers() {
        for (i, (version, shown)) in
            [("1 << 16 | 1", "1.1"), ("0", "0.0"), ("1", "0.1")].into_iter().enumerate()
        {
            let source = format!("unsigned sotto_abi_version(void) {{ return {version}; }}");
            expect(
                load(stub(&format!("version{i}"), &source)),
                &format!("has ABI {shown}, this crate was written for 0.2"),
            );
        }
    }

    #[test]
    fn a_missing_function_is_named() {
        let mut source = String::from("unsigned sotto_abi_version(void) { return 2; }\n");
        for name in &sotto::sys::Api::NAMES[1..] {
            if *name != "sotto_outer_vote" {
                source += &format!("int {name}(void) {{ return 0; }}\n");
            }
        }
        expect(
            load(stub("missing", &source)),
            "has no function sotto_outer_vote, which ABI 0.2 has",
        );
    }

    #[test]
    fn another_library_is_recognised() {
        expect(
            load(stub("other", "int other(void) { return 0; }")),
            "has no function sotto_abi_version, so it is not libsotto",
        );
    }

    #[test]
    fn a_named_library_that_is_missing_is_no_reason_to_take_another() {
        expect(
            load(Some("/nonexistent/libsotto.so".into())),
            "SOTTO_LIBRARY is set: /nonexistent/libsotto.so: cannot be loaded",
        );
    }

    #[test]
    fn without_any_library_the_error_lists_where_it_was_looked_for() {
        let run =
            program("load").env_remove("SOTTO_LIBRARY").env_remove("LD_LIBRARY_PATH").output();
        let said = text(&run.unwrap());
        if said.contains("Ok(") {
            println!("left out: libsotto is installed in the system");
            return;
        }
        for place in ["SOTTO_LIBRARY names (not set)", "../lib/libsotto.so.0", "loader looks"] {
            assert!(said.contains(place), "{said}");
        }
    }

    #[test]
    fn the_library_beside_the_program_is_found() {
        let folder = std::env::temp_dir().join(format!("sotto-{}-beside", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let program = folder.join("program");
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        let library = std::env::var_os("SOTTO_LIBRARY").expect("the tests need SOTTO_LIBRARY");
        std::os::unix::fs::symlink(library, folder.join("libsotto.so.0")).unwrap();
        let run = Command::new(program)
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env("RUST_TESTS_CHILD", "load")
            .env_remove("SOTTO_LIBRARY")
            .output()
            .unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        assert!(text(&run).contains("Ok(\"0.2"), "{}", text(&run));
    }
}

/// The raw interface: what does not fit is not written.
#[test]
#[cfg(not(feature = "link"))]
fn a_buffer_that_is_too_small_is_left_alone() {
    use sotto::sys;

    let path = std::env::var("SOTTO_LIBRARY").expect("the tests need SOTTO_LIBRARY") + "\0";
    let library = unsafe { sys::Library::open(path.as_bytes()) }.unwrap();
    let api = unsafe { sys::Api::load(|name| library.find(name)) }.unwrap();
    let json = b"{\"optimizer\": {\"type\": \"Adam\"}}\0".as_ptr();
    let (mut buffer, mut length) = ([b'x'; 10], 0);
    let mut ask = |cap| unsafe {
        (api.sotto_config_report)(json.cast(), 0, 0, buffer.as_mut_ptr().cast(), cap, &mut length)
    };
    assert_eq!(ask(10), sys::SOTTO_OK);
    assert!(length > 10);
    assert_eq!(buffer, [b'x'; 10]);
}

// ---- leaks, forks

fn resident_kib() -> i64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<i64>().unwrap() * 4
}

fn cycles(n: u32, comm: &Comm) {
    for _ in 0..n {
        let codec = Codec::new(comm, r#"{"type": "onebit"}"#, &[4096]).unwrap();
        comm.all_reduce(vec![0.0f32; 4096], &codec).unwrap().wait().unwrap();
        drop(comm.all_reduce(vec![0.0f32; 4096], ()).unwrap());
        comm.split(Some(0), 0).unwrap().unwrap().close().unwrap();
        let param = Param::new(vec![0.0f32; 4096], vec![0.0f32; 4096]);
        let mut optimizer = Optimizer::new(comm, ADAM, vec![param]).unwrap();
        drop(optimizer.step(()).unwrap());
        let _ = comm.report("all").unwrap();
        drop(optimizer);
        let param = Param::new(vec![0.0f32; 4096], vec![0.0f32; 4096]);
        let mut optimizer = Optimizer::new(comm, ADAM, vec![param]).unwrap();
        let state = optimizer.export_state(StateMode::Exact).unwrap();
        optimizer.import_state(StateMode::Exact, &state).unwrap();
    }
}

/// Threads and open files of this process.
fn held() -> [usize; 2] {
    ["/proc/self/task", "/proc/self/fd"].map(|folder| std::fs::read_dir(folder).unwrap().count())
}

/// A leak grows every time; an arena of the allocator is made once.
fn cycles_leave_nothing_behind() {
    let kept = alone();
    let bodies: [&dyn Fn(); 2] = [&|| cycles(100, &kept), &|| whole_cycles(100)];
    for body in bodies {
        (0..3).for_each(|_| body());
        let (before, mut grown) = (held(), Vec::new());
        while grown.len() < 3 && grown.last().map_or(true, |&kib| kib >= 1024) {
            let before = resident_kib();
            (0..10).for_each(|_| body());
            grown.push(resident_kib() - before);
        }
        common::nothing_is_left_behind();
        println!("KiB more, every time: {grown:?}");
        assert!(*grown.last().unwrap() < 1024);
        assert_eq!(held(), before, "threads, files");
    }
}

/// Contexts and comms that are dropped, or closed.
fn whole_cycles(n: u32) {
    for i in 0..n {
        let comm = alone();
        comm.all_reduce(vec![0.0f32; 100], ()).unwrap().wait().unwrap();
        if i % 2 == 0 {
            comm.close().unwrap();
        }
        context().unique_id().unwrap();
    }
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    let run = program("cycles").output().unwrap();
    assert!(run.status.success(), "{}", text(&run));
    assert!(text(&run).contains("KiB more"), "{}", text(&run));
}

/// A buffer whose view is taken between two meetings.
struct Slow(Vec<f32>, Arc<[Barrier; 2]>);

unsafe impl Source for Slow {
    fn read(&self, views: &mut Views) {
        self.0.read(views);
    }
}

unsafe impl Target for Slow {
    fn write(&mut self, views: &mut Views) {
        for meeting in self.1.iter() {
            meeting.wait();
        }
        self.0.write(views);
    }
}

/// What the child has ended with, of a fork while another thread has the comm.
fn forked_beside_a_thread(comm: &Comm) -> i32 {
    let meetings = Arc::new([Barrier::new(2), Barrier::new(2)]);
    let slow = Slow(vec![1.0], Arc::clone(&meetings));
    std::thread::scope(|scope| {
        scope.spawn(|| comm.all_reduce(slow, ()).unwrap().wait().unwrap());
        meetings[0].wait();
        let pid = unsafe { fork() };
        if pid == 0 {
            unsafe { alarm(30) };
            let told = comm.barrier(()).err().map(|error| error.status);
            unsafe { _exit(i32::from(told != Some(Status::InvalidState))) };
        }
        meetings[1].wait();
        let mut status = -1;
        unsafe { waitpid(pid, &mut status, 0) };
        status
    })
}

fn forks() {
    let comm = alone();
    println!("the child beside a thread said {}", forked_beside_a_thread(&comm));
    let op = comm.all_reduce(vec![1.0f32; 8], ()).unwrap();
    let pid = unsafe { fork() };
    if pid == 0 {
        let told = [comm.barrier(()).err(), op.wait().err()];
        let right = told.iter().flatten().all(|error| error.status == Status::InvalidState);
        drop(comm);
        unsafe { _exit(i32::from(!right || told.iter().any(Option::is_none))) };
    }
    let mut status = -1;
    unsafe { waitpid(pid, &mut status, 0) };
    op.wait().unwrap(); // the parent's goes on
    println!("the child said {status}");
}

#[test]
fn a_forked_child_is_told() {
    let run = program("forks").output().unwrap();
    assert!(text(&run).contains("the child beside a thread said 0"), "{}", text(&run));
    assert!(text(&run).contains("the child said 0"), "{}", text(&run));
}

// ---- ranks that end

/// Rank 1 ends in the middle; the others are told which rank it was.
fn dies() -> Result<()> {
    let comm = Comm::new(&context(), CommOptions::from_env().timeout(LIMIT))?;
    comm.barrier(())?.wait()?;
    if comm.rank() == 1 {
        unsafe { _exit(3) };
    }
    let error = comm.all_reduce(vec![0.0f32; 10], ()).and_then(|op| op.wait()).unwrap_err();
    println!("lost: {error}");
    let again = comm.barrier(()).and_then(|op| op.wait()).unwrap_err();
    println!("still lost: {:?} {:?}", again.status, comm.error().map(|error| error.status));
    drop(comm);
    Ok(())
}

#[test]
fn a_rank_that_dies_is_named() {
    let said = text(&launched(3, "dies"));
    assert_eq!(said.matches("lost: PEER_LOST: ").count(), 2, "{said}");
    assert_eq!(said.matches("still lost: PeerLost Some(PeerLost)").count(), 2, "{said}");
    assert!(
        said.lines()
            .filter(|line| line.contains("PEER_LOST"))
            .all(|line| { line.contains("rank 1") }),
        "{said}"
    );
    assert!(said.contains("rank 1 failed first, with exit code 3"), "{said}");
}

fn ends_early() -> Result<()> {
    let comm = Comm::new(&context(), CommOptions::from_env().timeout(LIMIT))?;
    let _waits = comm.all_reduce(vec![0.0f32; 1_000_000], ())?;
    drop(comm.all_reduce(vec![0.0f32; 1_000_000], ())?);
    std::mem::forget(comm.all_reduce(vec![0.0f32; 10], ())?);
    std::process::exit(0);
}

#[test]
fn a_process_may_end_with_operations_in_flight() {
    let said = text(&launched(3, "ends early"));
    assert!(!said.contains("signal"), "{said}");
}

// ---- signals

fn receives() {
    static STOPPED: AtomicBool = AtomicBool::new(false);
    handle_interrupts();
    ranks(2, |comm| {
        if comm.rank() == 1 {
            while !STOPPED.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
            }
            comm.send([7u8], 0, ()).unwrap().wait().unwrap();
            return;
        }
        let mut op = comm.recv([0u8], 1, ()).unwrap();
        println!("waiting");
        assert!(!op.wait_unless(interrupted).unwrap());
        STOPPED.store(true, Ordering::Relaxed);
        println!("interrupted, then {:?}", op.wait().unwrap());
    });
}

fn receives_without_a_handler() {
    unsafe { signal(SIGINT, SIG_DFL) };
    ranks(2, |comm| {
        if comm.rank() == 0 {
            let op = comm.recv([0u8], 1, ()).unwrap();
            println!("waiting");
            op.wait().unwrap();
        } else {
            std::thread::sleep(LIMIT);
        }
    });
}

fn meets() {
    handle_interrupts();
    let work = || {
        let context = context();
        let options = CommOptions::default().ranks(0, 2).id(context.unique_id()?).timeout(LIMIT);
        Comm::new(&context, options)
    };
    println!("waiting");
    println!("interrupted, then {:?}", sotto::interruptible(work, interrupted));
    assert_eq!(sotto::interruptible(|| 5, || true), Some(5));
}

/// Interrupts a process once it waits; its exit status, with what it said then.
fn interrupt(name: &str) -> (std::process::ExitStatus, String) {
    let mut process = program(name).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(process.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("waiting") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "{name}: it ended before it waited");
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(unsafe { kill(process.id() as i32, SIGINT) }, 0);
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    (process.wait().unwrap(), said)
}

#[test]
fn an_interrupt_gets_through_a_wait() {
    let (status, said) = interrupt("receives");
    assert!(status.success() && said.contains("interrupted, then [7]"), "{status} {said}");
    let (status, said) = interrupt("meets");
    assert!(status.success() && said.contains("interrupted, then None"), "{status} {said}");
}

#[test]
fn without_a_handler_an_interrupt_ends_the_process() {
    let (status, said) = interrupt("receives without a handler");
    assert_eq!(status.signal(), Some(SIGINT), "{said}");
}
