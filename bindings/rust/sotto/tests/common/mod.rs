//! Ranks for tests: threads of this process, or processes that sotto-run starts.
#![allow(dead_code)] // each test program uses a part

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use sotto::{Comm, CommOptions, Context, ContextOptions};

pub const LIMIT: Duration = Duration::from_secs(60);

pub fn context() -> Context {
    Context::with(ContextOptions { cpu_threads: 1, ..Default::default() }).unwrap()
}

/// A comm of this process alone.
pub fn alone() -> Comm {
    Comm::new(&context(), CommOptions::default().ranks(0, 1).timeout(LIMIT)).unwrap()
}

/// `body(comm)` on n threads; what they returned, in rank order. Panics with the first that does.
pub fn ranks<R: Send>(n: u32, body: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let first = context();
    let id = first.unique_id().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let (first, body) = (&first, &body);
                scope.spawn(move || {
                    let context = if rank == 0 { first.clone() } else { context() };
                    let options = CommOptions::default().ranks(rank, n).id(id).timeout(LIMIT);
                    body(Comm::new(&context, options).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What was dropped while it was in use is given back after a while.
pub fn nothing_is_left_behind() {
    let begin = Instant::now();
    while sotto::left_behind() > 0 {
        assert!(begin.elapsed() < LIMIT, "{} values are left behind", sotto::left_behind());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The program that starts ranks: of the build that runs the tests, else of preset dev.
pub fn sotto_run() -> PathBuf {
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../build/dev/bin/sotto-run");
    let path = std::env::var_os("BINDINGS_SOTTO_RUN").map_or(PathBuf::from(built), PathBuf::from);
    assert!(path.is_file(), "{} is not there: build the target sotto-run", path.display());
    path
}

/// This test program again, as a process whose test `child` does what `name` says.
pub fn program(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(words()).env("RUST_TESTS_CHILD", name);
    command
}

fn words() -> [&'static str; 4] {
    ["--exact", "child", "--ignored", "--nocapture"]
}

/// This test program as `n` ranks.
pub fn launched(n: u32, name: &str) -> Output {
    Command::new(sotto_run())
        .args(["-n", &n.to_string(), "--timeout", "100", "--grace", "60", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(words())
        .env("RUST_TESTS_CHILD", name)
        .env("SOTTO_CPU_THREADS", "1")
        .output()
        .unwrap()
}

pub fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    String::from_utf8_lossy(out).into_owned() + &String::from_utf8_lossy(err)
}
