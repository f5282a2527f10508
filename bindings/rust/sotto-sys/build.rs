//! With the feature `link`: says where libsotto is. `SOTTO_LIB_DIR` names a folder; else pkg-config
//! is asked. Nothing is downloaded or compiled.

use std::env;
use std::path::Path;
use std::process::{exit, Command};

/// The ABI that the crate was written for, as pkg-config's lowest version.
const NEEDED: &str = "0.2";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SOTTO_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    if env::var_os("CARGO_FEATURE_LINK").is_none() {
        return;
    }
    let found = match env::var("SOTTO_LIB_DIR") {
        Ok(folder) => in_folder(&folder),
        Err(_) => by_pkg_config(),
    };
    if let Err(text) = found {
        eprintln!("sotto-sys: {text}");
        exit(1);
    }
}

fn search(folder: &str) {
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:lib_dir={folder}"); // DEP_SOTTO_LIB_DIR of crates that depend on this one
}

fn in_folder(folder: &str) -> Result<(), String> {
    if !Path::new(folder).join("libsotto.so").exists() {
        return Err(format!(
            "SOTTO_LIB_DIR is \"{folder}\", and there is no libsotto.so; it has to be the folder \
             of the library"
        ));
    }
    search(folder);
    println!("cargo:rustc-link-lib=dylib=sotto");
    Ok(())
}

fn by_pkg_config() -> Result<(), String> {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_string());
    let wanted = format!("sotto >= {NEEDED}");
    let run = Command::new(&program).args(["--print-errors", "--libs", &wanted]).output().map_err(
        |error| {
            format!(
                "libsotto was not found: SOTTO_LIB_DIR is not set, and {program} cannot be \
                 started: {error}"
            )
        },
    )?;
    if !run.status.success() {
        return Err(format!(
            "libsotto was not found: SOTTO_LIB_DIR is not set, and {program} \"{wanted}\" said: {}",
            String::from_utf8_lossy(&run.stderr).trim()
        ));
    }
    for word in String::from_utf8_lossy(&run.stdout).split_whitespace() {
        match word.get(..2) {
            Some("-L") => search(&word[2..]),
            Some("-l") => println!("cargo:rustc-link-lib=dylib={}", &word[2..]),
            _ => {}
        }
    }
    Ok(())
}
