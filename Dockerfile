# crmatch on a CPU.
#
#   docker build -t crmatch .
#   docker run --rm -v "$PWD:/work" crmatch train my-photos
#
# Runs, reports and the cache of decoded pictures (.crmatch) are kept in the mounted directory.
FROM python:3.11-slim
COPY pyproject.toml constraints.txt README.md LICENSE /crmatch/
COPY src /crmatch/src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /crmatch/constraints.txt "/crmatch[pretrained,onnx]"
ENV CRMATCH_DATA=/work/.crmatch
WORKDIR /work
ENTRYPOINT ["crmatch"]
CMD ["--help"]
