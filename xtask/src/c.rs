//! The C interface's part of the test: `cargo xtask c`.
//!
//! The header is what the sources say; `make install` puts everything below `target/c/prefix`; the examples,
//! the tests' programs and the README's example are compiled as C99 and as C++11 against what was
//! installed, and run by the installed `deep-ep launch`. The conformance suite through C is a test of
//! the package `deep-ep-capi`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    command::{read, root, succeed, target},
    header,
};

/// A program, and how it is run.
struct Program {
    source: PathBuf,
    /// Numbers of ranks; 0: alone.
    ranks: &'static [usize],
}

/// How a source is compiled.
struct Language {
    compiler: &'static str,
    flags: [&'static str; 2],
}

const C: Language = Language {
    compiler: "gcc",
    flags: ["-xc", "-std=c99"],
};
const CPP: Language = Language {
    compiler: "g++",
    flags: ["-xc++", "-std=c++11"],
};

/// What is installed, and what is built with it.
struct Installed {
    prefix: PathBuf,
    programs: PathBuf,
}

/// Whether compilers and make are here; without, this part of the test is left out.
pub(crate) fn is_possible() -> bool {
    [C.compiler, CPP.compiler, "make", "pkg-config"]
        .into_iter()
        .all(|program| {
            let mut probe = Command::new(program);
            probe
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            probe.status().is_ok_and(|status| status.success())
        })
}

/// The whole part, as a command of its own.
pub(crate) fn command() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("this program's path")?);
    command.arg("c").current_dir(root());
    Ok(command)
}

/// Runs it.
pub(crate) fn run() -> Result<()> {
    header::check()?;
    let installed = Installed::new()?;
    let programs = programs(&installed)?;
    every_function_is_called(&programs)?;
    for program in &programs {
        for (language, name) in [(&C, "as-c"), (&CPP, "as-cpp")] {
            let built = installed.compile(language, program, name)?;
            for &ranks in program.ranks {
                installed.run(&built, ranks)?;
            }
        }
    }
    installed.runs_without_the_shared_library(&programs[0])?;
    installed.readme_says_what_it_prints()
}

/// Examples, tests, and the README's example.
fn programs(installed: &Installed) -> Result<Vec<Program>> {
    let examples = root().join("examples/c");
    let tests = root().join("crates/deep-ep-capi/tests/c");
    let program = |folder: &Path, name, ranks| Program {
        source: folder.join(name),
        ranks,
    };
    let readme = installed.programs.join("readme.c");
    fs::write(&readme, readme_example()?)?;
    Ok(vec![
        program(&examples, "train_step.c", &[2, 4]),
        program(&examples, "decode.c", &[1, 4]),
        program(&tests, "errors.c", &[1, 2, 4]),
        program(&tests, "exchange.c", &[1, 3, 4]),
        program(&tests, "settings.c", &[1, 3]),
        program(&tests, "threads.c", &[0]),
        Program {
            source: readme,
            ranks: &[1, 4],
        },
    ])
}

/// Every function of the header is called by a program, or by the conformance suite.
fn every_function_is_called(programs: &[Program]) -> Result<()> {
    let suite = root().join("crates/deep-ep-capi/tests/conformance/through_c");
    let suite = fs::read_dir(suite)?.flatten().map(|entry| entry.path());
    let mut callers = String::new();
    for source in programs
        .iter()
        .map(|program| program.source.clone())
        .chain(suite)
    {
        callers += &fs::read_to_string(&source)?;
    }
    let header = fs::read_to_string(root().join("crates/deep-ep-capi/include/deep_ep.h"))?;
    let missing: Vec<_> = header
        .lines()
        .filter_map(declared)
        .filter(|name| !callers.contains(name))
        .collect();
    ensure!(missing.is_empty(), "no test calls {}", missing.join(", "));
    Ok(())
}

/// The function that a line of the header declares.
fn declared(line: &str) -> Option<&str> {
    let (before, _) = line.split_once('(')?;
    let name = before.rsplit([' ', '*']).next()?;
    let declares = !line.starts_with([' ', '/', '#']) && name.starts_with("deep_ep_");
    declares.then_some(name)
}

/// The only block of C in the README.
fn readme_example() -> Result<String> {
    let text = fs::read_to_string(root().join("README.md")).context("reading README.md")?;
    let block = text
        .split_once("```c\n")
        .and_then(|(_, rest)| rest.split_once("```"));
    Ok(block.context("README.md has no block of C")?.0.to_owned())
}

impl Installed {
    fn new() -> Result<Self> {
        let folder = target().join("c");
        let this = Self {
            prefix: folder.join("prefix"),
            programs: folder.join("programs"),
        };
        // Nothing of an earlier installation may be found.
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("removing {}", folder.display()))?;
        }
        fs::create_dir_all(&this.programs)?;
        // The profile of the Rust tests, which have compiled most of it.
        this.make("install")?;
        Ok(this)
    }

    fn make(&self, goal: &str) -> Result<()> {
        let mut make = Command::new("make");
        make.args(["--no-print-directory", goal, "PROFILE=dev"])
            .arg(format!("PREFIX={}", self.prefix.display()))
            .stdout(Stdio::null())
            .current_dir(root());
        crate::command::for_cargo(&mut make);
        succeed(&mut make).context("make is needed for the C interface's part of the test")
    }

    fn library(&self) -> PathBuf {
        self.prefix.join("lib")
    }

    /// What pkg-config says, or would say where it is not installed.
    fn flags(&self, what: &[&str]) -> Result<Vec<String>> {
        let mut ask = Command::new("pkg-config");
        ask.args(what)
            .arg("deep_ep")
            .env("PKG_CONFIG_PATH", self.library().join("pkgconfig"));
        let words = match read(&mut ask) {
            Ok(words) => words,
            Err(_) if !self.has_pkg_config() => format!(
                "-I{0}/include -L{0}/lib -ldeep_ep -lgcc_s -lutil -lrt -lpthread -lm -ldl",
                self.prefix.display()
            ),
            Err(error) => return Err(error),
        };
        Ok(words.split_whitespace().map(str::to_owned).collect())
    }

    fn has_pkg_config(&self) -> bool {
        let mut probe = Command::new("pkg-config");
        probe.arg("--version").stdout(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    }

    fn compile(&self, language: &Language, program: &Program, suffix: &str) -> Result<PathBuf> {
        let name = program.source.file_stem().context("a source has a name")?;
        let built = self.programs.join(name).with_extension(suffix);
        let mut compile = Command::new(language.compiler);
        compile
            .args(language.flags)
            .args([
                "-O1",
                "-g",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-I",
            ])
            .arg(root().join("examples/c"))
            .arg(&program.source)
            .args(["-xnone", "-o"])
            .arg(&built)
            .args(self.flags(&["--cflags", "--libs"])?)
            .args(["-lm", "-lpthread"]);
        succeed(&mut compile)?;
        Ok(built)
    }

    fn launched(&self, program: &Path, ranks: usize) -> Command {
        let mut command = match ranks {
            0 => Command::new(program),
            _ => {
                let mut launch = Command::new(self.prefix.join("bin/deep-ep"));
                launch
                    .args(["launch", "-n", &ranks.to_string()])
                    .arg(program);
                launch
            }
        };
        command
            .env("LD_LIBRARY_PATH", self.library())
            .env("DEEP_EP_TIMEOUT_SECS", "60");
        command
    }

    fn run(&self, program: &Path, ranks: usize) -> Result<()> {
        succeed(&mut self.launched(program, ranks))
    }

    /// A program with the static library needs nothing that was installed.
    fn runs_without_the_shared_library(&self, program: &Program) -> Result<()> {
        let built = self.programs.join("static");
        let flags = self.flags(&["--cflags", "--libs", "--static"])?;
        let mut compile = Command::new(C.compiler);
        compile
            .args(C.flags)
            .arg(&program.source)
            .args(["-xnone", "-o"])
            .arg(&built);
        for flag in flags {
            match flag.as_str() {
                "-ldeep_ep" => compile.arg(self.library().join("libdeep_ep.a")),
                other => compile.arg(other),
            };
        }
        compile.arg("-lm");
        succeed(&mut compile)?;
        succeed(
            self.launched(&built, program.ranks[0])
                .env_remove("LD_LIBRARY_PATH"),
        )?;
        self.make("uninstall")?;
        let left: Vec<_> = ["bin/deep-ep", "lib/libdeep_ep.so", "include/deep_ep.h"]
            .into_iter()
            .filter(|file| self.prefix.join(file).symlink_metadata().is_ok())
            .collect();
        ensure!(left.is_empty(), "make uninstall left {left:?}");
        self.make("install")
    }

    /// On four ranks token 0 goes to two of them, and each sends back 2.
    fn readme_says_what_it_prints(&self) -> Result<()> {
        let printed = read(&mut self.launched(&self.programs.join("readme.as-c"), 4))?;
        let mut lines: Vec<_> = printed.lines().collect();
        lines.sort_unstable();
        if lines != ["[0] 4", "[1] 4", "[2] 4", "[3] 4"] {
            bail!("the README's example printed {printed}");
        }
        Ok(())
    }
}
