//! Continues a text: `stream ARTEFACT PROMPT [TOKENS [TEMPERATURE]]`. It says first how far this machine is from
//! the reference.

mod xl_export;

use std::io::Write;
use std::process::ExitCode;

use xl_export::Session;

fn run(arguments: &[String]) -> Result<(), String> {
    let [folder, prompt, ..] = arguments else {
        return Err("usage: stream ARTEFACT PROMPT [TOKENS [TEMPERATURE]]".to_string());
    };
    let session = Session::open(folder, 1)?;
    let mut options = session.options();
    if let Some(tokens) = arguments.get(2) {
        options.max_tokens = tokens.parse().map_err(|_| format!("TOKENS is {tokens}; expected a number."))?;
    }
    if let Some(heat) = arguments.get(3) {
        options.temperature =
            heat.parse().map_err(|_| format!("TEMPERATURE is {heat}; expected a number."))?;
    }
    match session.check() {
        Ok((difference, passed)) => {
            eprintln!(
                "at most {difference:.1e} nats from the reference: {}",
                if passed { "passed" } else { "FAILED" }
            );
        }
        Err(sentence) => eprintln!("not checked: {sentence}"),
    }
    let mut memory = session.start()?;
    // `print!` would panic once the reader is gone, as behind `| head`.
    let mut out = std::io::stdout();
    let _ = write!(out, "{prompt}");
    memory.generate(&session.encode(prompt)?, &options, |_, text| {
        write!(out, "{text}").and_then(|()| out.flush()).is_ok()
    })?;
    let _ = writeln!(out);
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("{sentence}");
            ExitCode::from(2)
        }
    }
}
